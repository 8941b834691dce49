"""Download a model of the Hugging Face hub, pinned to a commit and to the hash of each file.

huggingface_hub speaks to the hub: its endpoint, token and offline mode hold (``HF_ENDPOINT``,
``HF_TOKEN``, ``HF_HUB_OFFLINE``). Its own download to a file starts anew after an interruption, so
the bytes are received here. The model's folder appears when all files are complete and have the
hashes of the hub's listing. What an interrupted download leaves is continued by the next one.
Weights are safetensors alone, and no code is run.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.checkpoints import cards
from regard.checkpoints.downloads import (
    LOCK,
    Lock,
    Pin,
    changed,
    folder_of,
    hashes,
    lock_named,
    place,
)
from regard.checkpoints.files import CONFIG, first_line
from regard.checkpoints.recommended import full_name
from regard.errors import CheckpointError, InputError, UnknownModelError

if TYPE_CHECKING:
    import httpx

Show = Callable[[int, int], None]  # bytes that are here, of how many

INSTALL = "pip install 'regard[hub]'"
_SMALL = re.compile(r"(README\.md|LICENSE[\w.-]*|[\w.-]+\.(json|txt|model|spm|bpe|py))", re.ASCII)
_WEIGHTS = re.compile(r"model\.safetensors|model-\d+-of-\d+\.safetensors")
_PICKLES = re.compile(r"[\w.-]+\.(bin|pt|pth|ckpt|pkl|pickle|h5|msgpack|ot)", re.ASCII)
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONVERTER = "SFconvertbot"  # the hub's own account, which offers safetensors as pull requests
_SECONDS = 30.0  # to wait for the hub
_ATTEMPTS = 5  # without a byte, before a file is given up
_PAUSE = 1.0  # seconds before another attempt, doubled for each after it
_PASSING = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which another attempt may succeed
_PARTS = ".partial"  # the folder of downloads that are not complete


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file on the hub."""

    name: str
    size: int
    digest: str  # SHA-256 of large files, Git's SHA-1 of others

    def fits(self, file: Path) -> bool:
        return file.is_file() and file.stat().st_size == self.size and self.digest in hashes(file)


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on the hub at one commit, and the files to download."""

    name: str
    revision: str  # the commit
    reference: str  # the branch or pull request of the commit
    licence: str  # "" if the hub does not name it
    gated: bool
    architecture: str  # "" if the hub does not name it
    files: Sequence[Wanted]
    pinned: Mapping[str, Pin] = field(default_factory=dict)  # the lock of an earlier download
    here: bool = False  # whether all files are downloaded, and as they were

    @property
    def folder(self) -> Path:
        return folder_of(self.name)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def code(self) -> list[str]:
        """The Python files of the model, which run only if the user allows it."""
        return [file.name for file in self.files if file.name.endswith(".py")]

    @property
    def kept(self) -> int:
        """The bytes that an interrupted download of this commit has left."""
        parts = _parts(self.name, self.revision)
        return sum(file.stat().st_size for file in parts.glob("*") if file.is_file())


def get(name: str, revision: str | None = None) -> Path:
    """Download a model of the Hugging Face hub, and return its folder.

    ``name`` is a name on the hub, or the last part of the name of a recommended model. ``revision``
    is a branch, a tag or a commit. A model stays at the commit that was downloaded, until another
    ``revision`` is given; without one, a model that is here is checked, and repaired if need be.
    Nothing is asked: ``regard get`` tells the size and the licence first.

    >>> from regard import UnknownModelError, get
    >>> try:
    ...     get("a/b/c")
    ... except UnknownModelError as error:
    ...     print(str(error)[:34])
    a/b/c cannot be a name on the hub.
    """
    found = plan(name, revision)
    if found.here:
        return found.folder
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    settings = {"unit": "B", "unit_scale": True, "desc": found.name, "disable": None}
    with tqdm(total=found.size, **settings) as bar:  # type: ignore[no-untyped-call]
        return download(found, lambda done, _: bar.update(done - bar.n))


def plan(name: str, revision: str | None = None) -> Plan:
    """Ask the hub what to download. It is not asked about a model that is downloaded already."""
    if isinstance(name, str) and name in cards.names():
        raise InputError(f"{name} is shipped with regard: there is nothing to download.")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UnknownModelError(
            f"{name} cannot be a name on the hub. Give one such as openai-community/gpt2."
        )
    lock = lock_named(name)
    if lock is not None and revision in (None, lock.revision):
        if not changed(folder_of(lock.name), lock, thorough=True):
            return _held(lock)
        revision = lock.revision
    full = full_name(name) if lock is None else lock.name
    reference = revision or "main"
    with _hub_errors(full, reference):
        return _listed(full, reference)


def _held(lock: Lock) -> Plan:
    """The plan of a model that is here as it was downloaded."""
    files = [Wanted(name, pin.bytes, pin.sha256) for name, pin in lock.files.items()]
    return Plan(lock.name, lock.revision, lock.revision, lock.licence, False, "", files, here=True)


def _listed(full: str, reference: str) -> Plan:
    from huggingface_hub import HfApi

    api = HfApi()
    info = api.model_info(full, revision=reference, files_metadata=True, timeout=_SECONDS)
    siblings = {entry.rfilename: entry for entry in info.siblings or ()}
    if not any(map(_WEIGHTS.fullmatch, siblings)):
        other = _conversion(api, info.id) if reference == "main" else None
        if other is not None:
            return _listed(info.id, other)
        pickles = [name for name in siblings if _PICKLES.fullmatch(name)][:3]
        if pickles:
            raise CheckpointError(
                f"{full} has its weights as {' and '.join(pickles)} only. Opening such a file can "
                "run code, so regard downloads model.safetensors alone. Take a model that has it, "
                "or a revision: --revision."
            )
        raise CheckpointError(f"{full} has no model.safetensors at {reference}: it is no model.")
    if CONFIG not in siblings:
        raise CheckpointError(f"{full} has no {CONFIG} at {reference}, which tells what it is.")
    single = "model.safetensors" in siblings  # some models have their weights twice
    chosen = [
        entry
        for name, entry in siblings.items()
        if (_SMALL.fullmatch(name) and name != LOCK)
        or (name == "model.safetensors" if single else _WEIGHTS.fullmatch(name))
    ]
    files = []
    for entry in sorted(chosen, key=lambda entry: entry.rfilename):
        large = entry.lfs
        size = entry.size if large is None else large.size
        digest = entry.blob_id if large is None else large.sha256
        if size is None or digest is None:
            raise CheckpointError(f"The hub does not tell the size and hash of {entry.rfilename}.")
        files.append(Wanted(entry.rfilename, size, digest))
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise CheckpointError(f"The hub names no commit of {full} at {reference}, but {commit!r}.")
    lock = lock_named(info.id)
    pinned: Mapping[str, Pin] = {}
    if lock is not None and lock.revision == commit:
        if not changed(folder_of(lock.name), lock, thorough=True):
            return _held(lock)
        pinned = lock.files
    names = (info.config or {}).get("architectures") or [""]
    return Plan(
        info.id, commit, reference, _licence(info.card_data), bool(info.gated), str(names[0]),
        files, pinned,
    )  # fmt: skip


def _licence(card: Any) -> str:
    """The licence that a card on the hub names."""
    named = None if card is None else card.get("license")
    if named == "other":
        named = card.get("license_name") or named
    return ", ".join(named) if isinstance(named, list) else str(named or "")


def _conversion(api: Any, name: str) -> str | None:
    """The pull request in which the hub's converter offers safetensors."""
    offers = api.get_repo_discussions(
        name, author=_CONVERTER, discussion_type="pull_request", discussion_status="open"
    )
    return next(
        (
            f"refs/pr/{offer.num}"
            for offer in offers
            if offer.author == _CONVERTER and offer.is_pull_request and "safetensors" in offer.title
        ),
        None,
    )


# ------------------------------------------------------------------------------------ downloading


def download(plan: Plan, show: Show | None = None) -> Path:
    """Download the files of a plan, and return the model's folder."""
    if plan.here:
        return plan.folder
    parts = _parts(plan.name, plan.revision)
    with _alone(parts), _hub_errors(plan.name, plan.revision):
        parts.mkdir(exist_ok=True)
        _check_space(plan, parts)
        done, pins = 0, {}
        for wanted in plan.files:

            def tell(count: int, before: int = done) -> None:
                if show is not None:
                    show(before + count, plan.size)

            pins[wanted.name] = _complete(plan, wanted, parts, tell)
            done += wanted.size
        Lock(plan.name, plan.revision, plan.licence, pins).write(parts)
        _publish(parts, plan.folder)
    return plan.folder


def _parts(name: str, revision: str) -> Path:
    return place() / _PARTS / f"{folder_of(name).name}@{revision}"


@contextmanager
def _alone(parts: Path) -> Iterator[None]:
    """Keep other processes from the same download."""
    from filelock import FileLock, Timeout

    parts.parent.mkdir(parents=True, exist_ok=True)
    file = FileLock(parts.with_name(f"{parts.name}.lock"))
    try:
        with file.acquire(timeout=0):
            yield
    except Timeout:
        raise CheckpointError(
            f"Another process downloads {parts.name} now: wait for it to end."
        ) from None


def _check_space(plan: Plan, parts: Path) -> None:
    needed = plan.size - plan.kept
    free = shutil.disk_usage(parts).free
    if free < needed:
        raise CheckpointError(
            f"{plan.name} needs {needed / 1e6:,.1f} MB, but {place()} has "
            f"{free / 1e6:,.1f} MB free. Free some space, or set HF_HOME to another disk."
        )


def _complete(plan: Plan, wanted: Wanted, parts: Path, tell: Callable[[int], None]) -> Pin:
    """Make one file complete and proven."""
    file = parts / wanted.name
    old = plan.folder / wanted.name
    if not file.exists() and wanted.fits(old):
        shutil.copyfile(old, file)
    _receive(plan, wanted, file, tell)
    sha256, git = hashes(file)
    before = plan.pinned.get(wanted.name)
    right = wanted.digest in (sha256, git) and (before is None or before.sha256 == sha256)
    if not right:
        file.unlink()
        expected = wanted.digest if before is None else before.sha256
        raise CheckpointError(
            f"{wanted.name} of {plan.name} is not what it should be: its SHA-256 is {sha256} and "
            f"its hash in Git {git}, but {expected} was expected. It is removed. Try once more; if "
            "it happens again, do not use this model."
        )
    tell(wanted.size)
    return Pin(wanted.size, file.stat().st_mtime_ns, sha256)


def _receive(plan: Plan, wanted: Wanted, file: Path, tell: Callable[[int], None]) -> None:
    """Download the bytes of a file that are not here yet."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(plan.name, wanted.name, revision=plan.revision)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # so that ranges count bytes
    failures = 0
    error: Exception
    while (have := file.stat().st_size if file.exists() else 0) < wanted.size or not file.exists():
        tell(have)
        ranged = {"Range": f"bytes={have}-"} if have else {}
        try:
            with get_session().stream(
                "GET", url, headers=headers | ranged, timeout=_SECONDS
            ) as response:
                hf_raise_for_status(response)
                _append(response, file, have, wanted, tell)
            error = CheckpointError(f"The hub sent no more than {have:,} bytes of {wanted.name}.")
        except _http_library().TransportError as failure:
            error = failure
        except HfHubHTTPError as failure:
            if failure.response.status_code not in _PASSING:
                raise
            error = failure
        if file.exists() and file.stat().st_size > have:
            failures = 0
            continue
        failures += 1
        if failures == _ATTEMPTS:
            raise error
        time.sleep(_PAUSE * 2**failures)


def _append(
    response: httpx.Response, file: Path, have: int, wanted: Wanted, tell: Callable[[int], None]
) -> None:
    continued = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
    count = have if response.status_code == 206 and continued else 0
    with file.open("ab" if count else "wb") as opened:
        for block in response.iter_bytes():
            opened.write(block)
            count += len(block)
            if count > wanted.size:
                break  # the hash will be wrong
            tell(count)
        opened.flush()
        os.fsync(opened.fileno())


def _publish(parts: Path, folder: Path) -> None:
    """Put the complete files in the place of those that were there."""
    old = parts.with_name(f"{parts.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    parts.rename(folder)
    for left in parts.parent.glob(f"{folder.name}@*"):
        if left.is_dir():  # earlier downloads of other commits that were interrupted
            shutil.rmtree(left)


# ----------------------------------------------------------------------------------------- errors


def _http_library() -> Any:
    """The module whose client and errors huggingface_hub uses: httpx, and httpx2 from 2.0 on."""
    from huggingface_hub import __version__

    return import_module("httpx" if __version__.startswith("1.") else "httpx2")


@contextmanager
def _hub_errors(name: str, revision: str) -> Iterator[None]:
    """Raise the errors of huggingface_hub as ours."""
    try:
        from huggingface_hub import __version__, constants
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        if __version__.startswith("0."):
            raise ImportError
    except ImportError:
        raise InputError(
            f"Downloads need huggingface_hub 1 or newer, which is not installed: {INSTALL}"
        ) from None
    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError:
        raise CheckpointError(
            f"{name} is gated: its terms must be accepted at {hub}/{name}. Then log in with "
            "`hf auth login`, or set HF_TOKEN, and try again."
        ) from None
    except RevisionNotFoundError:
        raise InputError(f"{name} has no revision {revision!r} on the hub, {hub}.") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UnknownModelError(
            f"There is no model {name} on the hub, {hub}. If it is private, log in with "
            "`hf auth login`, or set HF_TOKEN."
        ) from None
    except OfflineModeIsEnabled:
        raise CheckpointError(
            f"{name} cannot be downloaded offline: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."
        ) from None
    except (HfHubHTTPError, _http_library().HTTPError) as error:
        raise CheckpointError(
            f"{name} could not be downloaded from {hub}: {first_line(error)} What is here is kept, "
            "and the same command continues."
        ) from None
