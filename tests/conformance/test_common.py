"""Whatever of transformers' common tests passes for LLaMA passes for a LLaMA with heads, or its reason stands here.

`make test-conformance CONFORMANCE=FOLDER` runs them; the folder is the `tests` of transformers' source, which a package
index has: `pip download --no-binary transformers --no-deps transformers==5.24.0`.
"""

import functools
import unittest
from unittest.mock import patch

import pytest

from hf_drafthead import MedusaForCausalLM
from tests.conformance.common import FOLDER, LlamaTester, MedusaTester, is_missing, load

if not FOLDER:
    pytest.skip("CONFORMANCE=FOLDER names transformers' tests", allow_module_level=True)

common = load("test_modeling_common")

VOCABULARY = "the heads go on guessing over the vocabulary that they were trained for"
COMPOSITE = "the model holds a base and heads, and has neither a backbone nor an attention of its own"
READ_ONLY = "labels train the heads, for which the base is read without gradients: nothing of it is checkpointed"
REASONS = {
    "test_bc_cache_name_forward": "the cache is taken by both of its names, without a warning",
    "test_model_weights_reload_no_missing_tied_weights": "a checkpoint that lacks a tensor is refused",
    "test_training_gradient_checkpointing": READ_ONLY,
    "test_training_gradient_checkpointing_use_reentrant_false": READ_ONLY,
    "test_training_gradient_checkpointing_use_reentrant_true": READ_ONLY,
    "test_resize_embeddings_untied": VOCABULARY,
    "test_resize_embeddings_untied_no_reinit_on_post_init": VOCABULARY,
    "test_resize_tokens_embeddings": VOCABULARY,
    "test_model_base_model_prefix": COMPOSITE,
    "test_sdpa_can_dispatch_non_composite_models": COMPOSITE,
}
# Skipped, for all to see, where the folder lacks the tests for generation, which both classes inherit.
GENERATION = "test_generation_tester_mixin_inheritance"
NOT_HERE = "generation/test_utils.py, transformers' tests for generation, is not in the folder"


class LlamaTest(common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = LlamaTester.all_model_classes

    def setUp(self) -> None:
        self.model_tester = LlamaTester(self)
        if self._testMethodName == GENERATION and is_missing("generation.test_utils"):
            self.skipTest(NOT_HERE)


class MedusaTest(common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = MedusaTester.all_model_classes

    def setUp(self) -> None:
        self.model_tester = MedusaTester(self)
        if self._testMethodName == GENERATION and is_missing("generation.test_utils"):
            self.skipTest(NOT_HERE)
        if self._testMethodName in REASONS:
            self.skipTest(REASONS[self._testMethodName])
        # The tests load what they have saved, and their base lies nowhere else.
        whole = functools.partialmethod(MedusaForCausalLM.save_pretrained, include_base=True)
        patcher = patch.object(MedusaForCausalLM, "save_pretrained", whole)
        patcher.start()
        self.addCleanup(patcher.stop)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        # transformers gives labels to the classes of its own list
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        return {**inputs, "labels": inputs["input_ids"]} if return_labels else inputs
