"""The rules of a call by themselves: the noise of sampling, and what each row is shown."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from hf_drafthead.generation import DraftTree
from hf_drafthead.generation.noise import NoiseTape, RandomNumbers
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.state import Candidates
from hf_drafthead.generation.step import Stages

ROWS, VOCABULARY = 3, 11
CPU = torch.device("cpu")


def noises(count: int) -> list[torch.Tensor]:
    """What `torch.multinomial` divides by at the first positions."""
    return [torch.empty(ROWS, VOCABULARY).exponential_(1) for _ in range(count)]


def at_seed(seed: int = 3) -> None:
    torch.manual_seed(seed)


LIKE = torch.empty(0, VOCABULARY)


def own_generator() -> torch.Generator:
    """A generator that stands where the process's stands."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


def test_noise_in_any_order_is_what_the_base_draws_one_after_the_other(monkeypatch):
    monkeypatch.setattr(NoiseTape, "KEPT", 2)
    at_seed()
    expected = noises(9)
    left_at = torch.get_rng_state()
    at_seed()
    tape = NoiseTape(ROWS, own_generator())
    for position in (4, 4, 0, 3, 8, 5, 1, 8):
        assert torch.equal(tape.noise(position, LIKE), expected[position])
    assert sorted(tape.drawn) == [7, 8]
    assert torch.equal(tape.states[9], left_at)
    ahead = tape.ahead([0, 5, 3], 3)
    assert torch.equal(ahead, torch.stack([torch.stack(expected[f : f + 3])[:, r] for r, f in enumerate([0, 5, 3])]))


def test_noise_is_what_the_base_draws_behind_an_object_that_has_drawn():
    at_seed()
    expected = [*noises(2), torch.rand(4), *noises(2), torch.rand(2), *noises(1)]
    left_at = torch.get_rng_state()
    at_seed()
    numbers = RandomNumbers()
    numbers.sample(ROWS, CPU)
    tape = numbers.tape
    tape.noise(4, LIKE)  # drawn ahead, in vain

    def choose(position: int) -> torch.Tensor:
        noise = tape.noise(position, LIKE)
        numbers.chosen(position + 1)
        return noise

    assert torch.equal(choose(0), expected[0]) and torch.equal(choose(1), expected[1]) and not numbers.moved
    with numbers.lent():
        assert torch.equal(torch.rand(4), expected[2])
    assert numbers.moved and torch.equal(choose(2), expected[3]) and torch.equal(choose(3), expected[4])
    with numbers.lent():
        assert torch.equal(torch.rand(2), expected[5])
    assert torch.equal(choose(4), expected[6])
    assert torch.equal(tape.noise(0, LIKE), expected[0])  # what was drawn before stands
    numbers.close()
    assert torch.equal(torch.get_rng_state(), left_at)


def test_others_draw_other_noise_meanwhile_and_where_they_do_the_generator_is_left_to_them():
    at_seed()
    expected = noises(2)
    at_seed()
    numbers = RandomNumbers()
    numbers.sample(ROWS, CPU)
    assert not any(torch.equal(other, noise) for other in noises(2) for noise in expected)
    moved_to = torch.get_rng_state()
    assert torch.equal(numbers.tape.noise(1, LIKE), expected[1])
    numbers.chosen(2)
    numbers.close()
    assert torch.equal(torch.get_rng_state(), moved_to)


class Unknown(LogitsProcessor):
    """Of the user's own."""

    def __call__(self, input_ids, scores):
        return scores


class Views(Unknown):
    """Says which rows it was shown, and adds to each a number of its own."""

    def __init__(self, rows=None):
        self.rows = rows

    def for_rows(self, rows):
        return Views(rows)

    def __call__(self, input_ids, scores):
        return scores + input_ids.shape[1] * 100 + torch.tensor(self.rows)[:, None]


def rules_of(given=(), criteria=None, rows: int = ROWS, samples: bool = False, **config) -> Rules:
    config = GenerationConfig(**config)
    config._pad_token_tensor = torch.tensor(5)
    criteria = [MaxLengthCriteria(12), EosTokenCriteria(torch.tensor([7, 2]))] if criteria is None else criteria
    return Rules(
        LogitsProcessorList(given),
        StoppingCriteriaList(criteria),
        config,
        batch_size=rows,
        prompt_length=2,
        device=CPU,
        samples=samples,
    )


KEEPS = {"return_dict_in_generate": True, "output_scores": True}
KINDS = {
    "nothing": (rules_of, True, False),
    "scores only": (lambda: rules_of([processors.TopKLogitsWarper(3)]), True, False),
    "sampling": (lambda: rules_of(samples=True), True, False),
    "prefixes": (lambda: rules_of([processors.RepetitionPenaltyLogitsProcessor(1.1)]), False, False),
    "views": (lambda: rules_of([Views()]), False, False),
    "of the user": (lambda: rules_of([Unknown()]), False, True),
    "time": (lambda: rules_of(criteria=[MaxLengthCriteria(9), MaxTimeCriteria(9.0)]), False, False),
    "no length": (lambda: rules_of(criteria=[EosTokenCriteria(torch.tensor([2]))]), False, False),
    "scores asked for": (lambda: rules_of(**KEEPS), False, True),
    "scores asked for without padding": (
        lambda: rules_of(criteria=[MaxLengthCriteria(9)], **KEEPS),
        False,
        False,
    ),
    "scores asked for, but no dict": (lambda: rules_of(output_scores=True), True, False),
    "one row": (lambda: rules_of(rows=1), True, True),
}


@pytest.mark.parametrize("make, on_device, lockstep", KINDS.values(), ids=KINDS)
def test_kinds_of_calls(make, on_device, lockstep):
    rules = make()
    assert (rules.on_device, rules.lockstep) == (on_device, lockstep)
    assert rules.greedy == (on_device and not rules.processors and not rules.samples)


def test_what_a_call_says_about_its_ends():
    rules = rules_of()
    assert (rules.pads, rules.pad_token, rules.max_length, rules.eos_tokens) == (True, 5, 12, [2, 7])
    rules = rules_of(criteria=[MaxLengthCriteria(12), MaxLengthCriteria(9)])
    assert (rules.pads, rules.pad_token, rules.max_length, rules.eos_tokens) == (False, 0, 9, [])
    rules = rules_of([processors.TemperatureLogitsWarper(0.5), processors.TemperatureLogitsWarper(3.0)])
    assert rules.tilt(torch.tensor(2.0).exp()) == -3.0


def test_rows_of_one_length_are_shown_together_and_their_scores_kept_at_their_own_positions():
    rules = rules_of([Views()], criteria=[MaxLengthCriteria(12)], **KEEPS, output_logits=True)
    logits = torch.arange(2.0 * VOCABULARY).reshape(2, VOCABULARY)
    sequences, lengths = torch.zeros(ROWS, 9, dtype=torch.long), [4, 6, 3]
    assert rules.choose([2, 1], logits, sequences, lengths).tolist() == [VOCABULARY - 1] * 2
    assert torch.equal(rules.scores[1][2], logits[0] + 302) and torch.equal(rules.scores[4][1], logits[1] + 601)
    assert len(rules.scores) == len(rules.logits) == 5 and torch.equal(rules.logits[4][1], logits[1])
    assert not rules.scores[1][:2].any() and not rules.scores[3].any()


def test_criteria_are_shown_rows_of_one_length_together():
    class Even:
        def __call__(self, input_ids, scores, **kwargs):
            assert (input_ids[:, -1] == input_ids.shape[1]).all()
            return input_ids[:, 0] % 2 == 0

    rules = replace(rules_of(), criteria=StoppingCriteriaList([Even()]))
    lengths = [4, 6, 4]
    sequences = torch.tensor([[row, 0, 0, 4, 0, 6] for row in range(ROWS)])
    assert rules.stops([2, 1, 0], [4, 6, 4], sequences, lengths) == [True, False, True]


def test_logits_of_float64_are_rounded_as_the_base_rounds_and_others_left():
    rows = SimpleNamespace(position_shift=0, visible=None, cache=SimpleNamespace(lengths=torch.ones(1)))
    values = torch.tensor([[[1.0, 1.0 + 1e-12]]], dtype=torch.float64)
    for logits, dtype in ((values, torch.float32), (values.bfloat16(), torch.bfloat16)):
        stages = Stages(SimpleNamespace(nodes=lambda *_, logits=logits: (logits, None)), None, DraftTree([]))
        verified = stages.verify(rows, None, Candidates(torch.zeros(1, 1), None)).logits
        assert verified.dtype == dtype and verified.argmax().item() == 0


def test_rows_that_stand_still_are_given_no_noise_of_positions_that_nobody_drew():
    rules = rules_of(samples=True)
    at_seed()
    expected = noises(8)
    at_seed()
    rules.random.tape.go_on(0, torch.get_rng_state())
    rules.random.tape.noise(0, LIKE)
    found = rules.noise_ahead([5, 3, 4], [0, 2], 2, VOCABULARY)
    assert torch.equal(found[0], torch.stack([expected[3][0], expected[4][0]]))
    assert torch.equal(found[1], torch.stack([expected[3][1], expected[4][1]]))  # as the longest
    assert torch.equal(found[2], torch.stack([expected[2][2], expected[3][2]]))
    assert sorted(rules.random.tape.states) == [2, 3, 4, 5]
    assert torch.equal(rules.tilt(found), found.log() * -1.0)
    assert rules_of().noise_ahead([3] * ROWS, [0], 2, VOCABULARY) is None


@pytest.mark.parametrize("lockstep", [False, True])
def test_tokens_are_sampled_as_multinomial_samples_them(lockstep):
    """All rows one position after the other; at their own pace also a row that lags behind, and one alone."""
    logits = torch.randn(4, ROWS, VOCABULARY)
    at_seed()
    expected = [torch.multinomial(position.softmax(-1), 1)[:, 0].tolist() for position in logits]
    left_at = torch.get_rng_state()
    at_seed()
    rules = rules_of([Unknown()] if lockstep else [], samples=True)
    sequences = torch.zeros(ROWS, 9, dtype=torch.long)
    found = [rules.choose([0, 1, 2], logits[t], sequences, [2 + t] * ROWS).tolist() for t in range(4)]
    assert found == expected
    rules.random.close()
    assert torch.equal(torch.get_rng_state(), left_at)
    if not lockstep:
        both = rules.choose([2, 0], torch.stack([logits[1, 2], logits[3, 0]]), sequences, [5, 4, 3])
        assert both.tolist() == [expected[1][2], expected[3][0]]
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        rules.choose([0, 1, 2], logits[3] * torch.nan, sequences, [5] * ROWS)


def test_every_node_s_choice_is_the_one_that_is_made_at_its_position():
    logits, noise = torch.randn(ROWS, 4, VOCABULARY), torch.empty(ROWS, 2, VOCABULARY).exponential_(1)
    depths = torch.tensor([[0, 1, 1, 1]])
    rules = rules_of([processors.TopPLogitsWarper(0.7)], samples=True)
    logits[2, 1] = torch.nan
    choice, valid = rules.choose_everywhere(logits, depths, noise)
    for row in range(ROWS):
        for node in range(4):
            assert bool(valid[row, node]) == ((row, node) != (2, 1))
            chances = processors.TopPLogitsWarper(0.7)(None, logits[row, node][None]).softmax(-1)[0]
            if valid[row, node]:
                assert choice[row, node] == (chances / noise[row, depths[0, node]]).argmax()
    choice, valid = rules_of([processors.SuppressTokensLogitsProcessor([4])]).choose_everywhere(
        torch.eye(VOCABULARY)[None, 4:6].double().expand(ROWS, -1, -1), depths[:, :2], None
    )
    assert choice.tolist() == [[0, 5]] * ROWS and valid.all()


def test_behind_an_object_that_has_drawn_guesses_know_no_noise():
    rules = rules_of([Unknown(), processors.TemperatureLogitsWarper(0.5)], samples=True)
    logits, sequences = torch.randn(ROWS, VOCABULARY), torch.zeros(ROWS, 9, dtype=torch.long)
    at_seed()
    left_at = torch.get_rng_state()
    rules.choose([0, 1, 2], logits, sequences, [2] * ROWS)
    noise = rules.noise_ahead([3] * ROWS, [0, 1, 2], 2, VOCABULARY)
    assert torch.equal(torch.get_rng_state(), left_at)
    assert torch.equal(rules.tilt(noise), noise.log() * -0.5)
    with rules.random.lent():
        torch.rand(1)
    rules.choose([0, 1, 2], logits, sequences, [3] * ROWS)
    noise = rules.noise_ahead([4] * ROWS, [0, 1, 2], 2, VOCABULARY)
    assert not rules.tilt(noise).any()  # somebody else has drawn: what comes next is not known


@pytest.mark.parametrize("asked", [False, True])
def test_in_lockstep_criteria_are_shown_all_rows_and_the_scores_that_are_kept(asked):
    shown = []

    class Shown:
        def __call__(self, input_ids, scores, **kwargs):
            shown.append((input_ids, scores))
            return input_ids[:, -1] == 1

    rules = rules_of(criteria=[Shown(), MaxLengthCriteria(20)], **(KEEPS if asked else {}), output_logits=True)
    assert rules.lockstep and rules.keeps_logits == asked
    logits, sequences = torch.randn(ROWS, VOCABULARY), torch.tensor([[0, 0, 0, 1, 9], [0, 0, 0, 2, 9], [0, 0, 0, 1, 9]])
    rules.choose([0, 1, 2], logits, sequences, [3] * ROWS)
    assert rules.stops([0, 1, 2], [1, 2, 1], sequences, [4] * ROWS) == [True, False, True]
    ((input_ids, scores),) = shown
    assert torch.equal(input_ids, sequences[:, :4])
    assert (len(scores) == 1 and torch.equal(scores[0], logits)) if asked else scores is None
    assert len(rules.scores) == len(rules.logits) == asked


def test_a_row_that_is_shown_alone_keeps_its_own_padding_from_the_penalty():
    """A repetition penalty that ignores prompts holds a number for every row of the batch."""
    penalty = processors.RepetitionPenaltyLogitsProcessor(2.0)
    penalty.prompt_ignore_length = torch.tensor([[0], [3], [1]])
    rules, logits = rules_of([penalty]), torch.ones(2, VOCABULARY)
    sequences, seen = torch.tensor([[1, 2, 3, 4]] * ROWS), []

    class Looks(processors.RepetitionPenaltyLogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(self.prompt_ignore_length.flatten().tolist())
            return scores

    penalty.__class__ = Looks
    rules.scores_only = rules.lockstep = False
    rules.choose([2, 1], logits, sequences, [4] * ROWS)
    assert seen == [[1, 3]] and penalty.prompt_ignore_length.shape == (3, 1)
