"""A small Hub on 127.0.0.1 for the tests: repositories, commits, branches, pull requests and large files over HTTP.

Only what huggingface_hub and transformers ask for when they push and load models. Large files live at a second port, as
on the Hub: a client follows a redirect to the same origin without a word, and would send its token along.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".bin", ".png", ".pt")
MAIN = "main"
MISSING, NO_REVISION, NO_ENTRY, GATED = "RepoNotFound", "RevisionNotFound", "EntryNotFound", "GatedRepo"


@dataclass
class User:
    """Who a token belongs to, where it may write, and what it may read behind a gate."""

    name: str
    orgs: tuple[str, ...] = ()
    write: bool = True
    passed_gates: tuple[str, ...] = ()

    def owns(self, repo_id: str) -> bool:
        """Whether the repository lies in a namespace of this user."""
        return repo_id.split("/")[0] in (self.name, *self.orgs)


@dataclass(frozen=True)
class Blob:
    """One file of a commit: what it holds, and whether it is a large one."""

    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        """By which large files are named."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def sha1(self) -> str:
        """By which git names a file."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        """As the tree lists it."""
        found: dict[str, Any] = {"type": "file", "path": path, "oid": self.sha1, "size": len(self.data)}
        if self.large:
            found["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 130}
        return found


@dataclass
class Commit:
    """The files of a repository at one time."""

    oid: str
    title: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """A repository and its history, oldest commit first."""

    id: str
    private: bool = False
    gated: bool = False
    commits: list[Commit] = field(default_factory=list)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, Blob], title: str, ref: str = MAIN) -> Commit:
        """A new state of a branch."""
        oid = hashlib.sha1(f"{self.id} {len(self.commits)} {title}".encode()).hexdigest()
        self.commits.append(Commit(oid, title, files))
        self.refs[ref] = oid
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        """The commit that a branch, pull request or commit id names."""
        oid = self.refs.get(revision, revision)
        return next((commit for commit in self.commits if commit.oid == oid), None)

    def files(self, revision: str = MAIN) -> dict[str, bytes]:
        """What a revision holds, by path."""
        commit = self.at(revision)
        assert commit is not None
        return {path: blob.data for path, blob in commit.files.items()}


@dataclass(frozen=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    token: str | None
    storage: bool


@dataclass
class Fault:
    """Answer the next `times` requests that match with `status`."""

    method: str
    path: str
    times: int
    status: int


class Refused(Exception):
    """An answer that is no success; its code travels in a header."""

    def __init__(self, status: int, code: str | None = None, message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class LoopbackHub:
    """The Hub, its storage, and a record of every request; use it with `with`."""

    def __init__(self) -> None:
        self.users = {
            "hf_owner": User("owner", orgs=("org",), passed_gates=("org/gated",)),
            "hf_reader": User("reader", write=False),
            "hf_stranger": User("stranger"),
        }
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.hub = _serve(self, storage=False)
        self.storage = _serve(self, storage=True)
        self.url = f"http://127.0.0.1:{self.hub.server_port}"
        self.storage_url = f"http://127.0.0.1:{self.storage.server_port}"

    def __enter__(self) -> "LoopbackHub":
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.hub, self.storage):
            server.shutdown()
            server.server_close()

    def reset(self) -> None:
        """Forget all repositories, requests and faults."""
        for kept in (self.repos, self.stored, self.asked, self.faults):
            kept.clear()

    def add(self, repo_id: str, files: dict[str, bytes], *, private: bool = False, gated: bool = False) -> Repo:
        """A repository that is there already, or a new commit in it."""
        repo = self.repos.setdefault(repo_id, Repo(repo_id))
        repo.private, repo.gated = private, gated
        repo.commit({path: self.blob(path, data) for path, data in files.items()}, "Upload")
        return repo

    def blob(self, path: str, data: bytes) -> Blob:
        """A file as the Hub would keep it."""
        found = Blob(data, large=path.endswith(LARGE))
        if found.large:
            self.stored[found.sha256] = data
        return found

    def fail(self, method: str, path: str, times: int, *, status: int) -> None:
        """Let the next requests fail whose path matches a regular expression."""
        self.faults.append(Fault(method, path, times, status))

    def fault(self, method: str, path: str) -> Fault | None:
        """The fault that this request meets."""
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def count(self, method: str, path: str) -> int:
        """How many requests of a kind came in."""
        return sum(1 for one in self.asked if one.method == method and re.search(path, one.path))


def _serve(hub: LoopbackHub, storage: bool) -> ThreadingHTTPServer:
    handler = type("Handler", (_Storage if storage else _Hub,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    is_storage = False
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Say nothing: the requests are kept in `asked`."""

    def handle_any(self) -> None:
        split = urlsplit(self.path)
        self.route, self.query = unquote(split.path), parse_qs(split.query)
        authorization = self.headers.get("Authorization")
        self.token = authorization.removeprefix("Bearer ") if authorization else None
        self.hub.asked.append(Asked(self.command, self.path, self.token, self.is_storage))
        # Read before any answer: what is left over would be taken for the next request.
        self.body = self.read_body(int(self.headers.get("Content-Length") or 0))
        if fault := self.hub.fault(self.command, self.path):
            return self.answer(fault.status, b"sign in" if fault.status == 200 else {"error": "try again"})
        try:
            self.dispatch()
        except Refused as refused:
            headers = {"X-Error-Message": refused.message or f"refused with {refused.status}"}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            headers.update(getattr(refused, "headers", {}))
            self.answer(refused.status, {"error": refused.message}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def dispatch(self) -> None:
        raise NotImplementedError

    def read_body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(length)
        data = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Storage(_Handler):
    is_storage = True

    def dispatch(self) -> None:
        sha = self.route.rsplit("/", 1)[1]
        if self.command == "PUT":
            if hashlib.sha256(self.body).hexdigest() != sha:
                raise Refused(400, message="the content is not what its name says")
            self.hub.stored[sha] = self.body
            return self.answer(200, b"", {"ETag": f'"{sha}"'})
        if sha not in self.hub.stored:
            raise Refused(404)
        self.answer(200, self.hub.stored[sha], {"ETag": f'"{sha}"'})


class _Hub(_Handler):
    def dispatch(self) -> None:
        if self.token is not None and self.token not in self.hub.users:
            raise Refused(401, message="Invalid credentials in Authorization header")
        self.user = self.hub.users.get(self.token or "")
        for method, pattern, call in ROUTES:
            match = re.fullmatch(pattern, self.route)
            if match and (self.command == method or (method == "GET" and self.command == "HEAD")):
                with self.hub.lock:
                    return call(self, **match.groupdict())
        raise Refused(404, message=f"no such route: {self.command} {self.route}")

    # ---- who may do what ---------------------------------------------------------------------------------------------

    def readable(self, repo: str) -> Repo:
        found = self.hub.repos.get(repo)
        if found is None or (found.private and not (self.user and self.user.owns(repo))):
            raise Refused(404 if self.user else 401, MISSING, "Repository not found")
        return found

    def downloadable(self, repo: str) -> Repo:
        found = self.readable(repo)
        if found.gated and not (self.user and repo in self.user.passed_gates):
            words = f"Access to model {repo} is restricted."
            raise Refused(403 if self.user else 401, GATED, words)
        return found

    def writable(self, repo: str) -> Repo:
        found = self.readable(repo)
        self.check_write(repo)
        return found

    def check_write(self, repo: str) -> None:
        if self.user is None:
            raise Refused(401, message="Invalid username or password.")
        if not self.user.write or not self.user.owns(repo):
            raise Refused(403, message=f"You don't have the rights to write to {repo}")

    def revision(self, repo: Repo, revision: str) -> Commit:
        found = repo.at(revision)
        if found is None and not repo.commits:
            return Commit("0" * 40, "", {})
        if found is None:
            raise Refused(404, NO_REVISION, f"Invalid rev id: {revision}")
        return found

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    # ---- repositories ------------------------------------------------------------------------------------------------

    def create_repo(self) -> None:
        given = self.json
        owner = given.get("organization") or (self.user.name if self.user else "nobody")
        repo = f"{owner}/{given['name']}"
        self.check_write(repo)
        known = repo in self.hub.repos
        if not known:
            private = given.get("visibility") == "private" or bool(given.get("private"))
            made = self.hub.repos[repo] = Repo(repo, private=private)
            made.commit({".gitattributes": Blob(b"*.safetensors filter=lfs\n", False)}, "initial commit")
        answer = {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo}
        if known:
            answer["error"] = "You already created this model repo"
        self.answer(409 if known else 200, answer)

    def whoami(self) -> None:
        if self.user is None:
            raise Refused(401, message="Invalid username or password.")
        orgs = [{"type": "org", "name": name} for name in self.user.orgs]
        role = "write" if self.user.write else "read"
        self.answer(
            200, {"type": "user", "name": self.user.name, "orgs": orgs, "auth": {"accessToken": {"role": role}}}
        )

    def info(self, repo: str, rev: str = MAIN) -> None:
        found = self.readable(repo)
        commit = self.revision(found, rev)
        readme = commit.files.get("README.md")
        siblings = [
            {"rfilename": path, "size": len(blob.data), "blobId": blob.sha1} for path, blob in commit.files.items()
        ]
        self.answer(
            200,
            {
                "id": repo,
                "sha": commit.oid,
                "private": found.private,
                "gated": "manual" if found.gated else False,
                "tags": [],
                "cardData": front_matter(readme.data) if readme else {},
                "siblings": siblings,
                "lastModified": "2026-01-01T00:00:00.000Z",
                "createdAt": "2026-01-01T00:00:00.000Z",
            },
        )

    def tree(self, repo: str, rev: str, path: str = "") -> None:
        files = self.revision(self.readable(repo), rev).files
        inside = {name: blob for name, blob in files.items() if not path or name.startswith(f"{path}/")}
        if path and not inside:
            raise Refused(404, NO_ENTRY, f"{path} does not exist")
        self.answer(200, [blob.entry(name) for name, blob in inside.items()])

    def branch(self, repo: str, name: str) -> None:
        found = self.writable(repo)
        if name in found.refs:
            raise Refused(409, message=f"Reference already exists: {name}")
        found.refs[name] = self.revision(found, self.json.get("startingPoint") or MAIN).oid
        self.answer(200, {})

    # ---- push --------------------------------------------------------------------------------------------------------

    def validate_yaml(self) -> None:
        data = front_matter(self.json["content"].encode())
        errors = [] if isinstance(data, dict) else [{"message": "the metadata are no mapping"}]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def check_push(self, repo: str) -> Repo:
        """Anybody who is signed in may propose a change; only who owns the repository may make it."""
        if self.query.get("create_pr"):
            if self.user is None:
                raise Refused(401, message="Invalid username or password.")
            return self.readable(repo)
        return self.writable(repo)

    def preupload(self, repo: str, rev: str) -> None:
        files = self.revision(self.check_push(repo), rev).files
        answers = []
        for given in self.json["files"]:
            path = given["path"]
            large = path.endswith(LARGE) and given["size"] > 0
            one = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if path in files:
                one["oid"] = files[path].sha256 if files[path].large else files[path].sha1
            answers.append(one)
        self.answer(200, {"files": answers})

    def lfs_batch(self, repo: str) -> None:
        self.readable(repo)
        if self.user is None:
            raise Refused(401, message="Invalid username or password.")
        objects = []
        for given in self.json["objects"]:
            one = {"oid": given["oid"], "size": given["size"]}
            if given["oid"] not in self.hub.stored:
                upload = {"href": f"{self.hub.storage_url}/lfs/{given['oid']}"}
                one["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/verify/{given['oid']}"}}
            objects.append(one)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def verify(self, sha: str) -> None:
        given = self.json
        if given["oid"] != sha or len(self.hub.stored.get(sha, b"")) != given["size"]:
            raise Refused(400, message="not what was uploaded")
        self.answer(200, {})

    def commit(self, repo: str, rev: str) -> None:
        found = self.check_push(repo)
        files = dict(self.revision(found, rev).files)
        title = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit", found.refs.get(rev)) != found.refs.get(rev):
                    raise Refused(412, message="a commit has happened since")
            elif entry["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), large=False)
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise Refused(400, message=f"{value['path']} was not uploaded")
                files[value["path"]] = Blob(self.hub.stored[value["oid"]], large=True)
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        pulls = sum(1 for name in found.refs if name.startswith("refs/pr/"))
        proposal = bool(self.query.get("create_pr"))
        made = found.commit(files, title, f"refs/pr/{pulls + 1}" if proposal else rev)
        answer = {"success": True, "commitOid": made.oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{made.oid}"}
        if proposal:
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{pulls + 1}"
        self.answer(200, answer)

    # ---- load --------------------------------------------------------------------------------------------------------

    def resolve(self, repo: str, rev: str, path: str) -> None:
        commit = self.revision(self.downloadable(repo), rev)
        headers = {"X-Repo-Commit": commit.oid}
        if path not in commit.files:
            missing = Refused(404, NO_ENTRY, f"{path} does not exist")
            missing.headers = headers  # type: ignore[attr-defined]
            raise missing
        blob = commit.files[path]
        if blob.large:
            place = f"{self.hub.storage_url}/lfs/{blob.sha256}"
            linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data)), "Location": place}
            return self.answer(302, b"", headers | linked)
        self.answer(200, blob.data, headers | {"ETag": f'"{blob.sha1}"'})


API = r"/api/models/(?P<repo>[^/]+/[^/]+)"
REV = r"(?P<rev>refs/pr/\d+|[^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", _Hub.create_repo),
    ("GET", "/api/whoami-v2", _Hub.whoami),
    ("POST", "/api/validate-yaml", _Hub.validate_yaml),
    ("POST", rf"{API}/preupload/{REV}", _Hub.preupload),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _Hub.lfs_batch),
    ("POST", r"/verify/(?P<sha>[0-9a-f]{64})", _Hub.verify),
    ("POST", rf"{API}/commit/{REV}", _Hub.commit),
    ("GET", API, _Hub.info),
    ("GET", rf"{API}/revision/{REV}", _Hub.info),
    ("GET", rf"{API}/tree/{REV}(/(?P<path>.+))?", lambda self, repo, rev, path: self.tree(repo, rev, path or "")),
    ("POST", rf"{API}/branch/(?P<name>.+)", _Hub.branch),
    ("GET", rf"/(?P<repo>[^/]+/[^/]+)/resolve/{REV}/(?P<path>.+)", _Hub.resolve),
]


def front_matter(data: bytes) -> Any:
    """The metadata at the head of a card."""
    found = re.match(rb"\A---\n(.*?)\n---\n", data, re.DOTALL)
    return yaml.safe_load(found[1]) if found else {}
