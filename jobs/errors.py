"""One error tree: every error a person can cause or meet has a code, a cause and a next step."""

from __future__ import annotations


class ChorusBatchError(Exception):
    """Root of the tree.

    `code` is stable and machine-readable; `hint` says what to do next; `exit_code` is what the command line ends with.
    """

    code = "internal"
    exit_code = 10

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if code is not None:
            self.code = code


class UsageError(ChorusBatchError):
    """The command was called with arguments that don't fit together."""

    code = "usage"
    exit_code = 2


class InputRejected(ChorusBatchError):
    """A file of prompts is not valid; nothing of it was stored."""

    code = "input_rejected"
    exit_code = 3


class WeightsRejected(ChorusBatchError):
    """A model's files are missing, cut short, of another model, or not those that its card names."""

    code = "weights"
    exit_code = 3


class NotFound(ChorusBatchError):
    """A batch, job or cache entry of that name doesn't exist."""

    code = "not_found"
    exit_code = 4


class Conflict(ChorusBatchError):
    """The same thing was already submitted."""

    code = "conflict"
    exit_code = 5


class DependencyDown(ChorusBatchError):
    """A server that the command needs can't be reached or started."""

    code = "dependency_down"
    exit_code = 6

    @property
    def passing(self) -> bool:
        """Whether waiting may mend it. A job that meets one that waiting won't mend must not be tried for ever."""
        return True


class StorageError(DependencyDown):
    """The object store refused, timed out, or returned something else than was stored."""

    code = "storage"

    @property
    def passing(self) -> bool:
        """True if the server is away, or its keys or bucket are wrong: a person mends that, and it's no job's fault."""
        return self.code in ("storage_unreachable", "storage_denied", "bucket_missing")


class ObjectMissing(StorageError):
    """An object that the database promises isn't in the store."""

    code = "object_missing"


class ObjectCorrupt(StorageError):
    """An object's size or sha256 isn't what the database promises."""

    code = "object_corrupt"


class SettingsError(ChorusBatchError):
    """A setting has a value that can't be used; the message names the setting."""

    code = "settings"
    exit_code = 2


class ClaimLost(ChorusBatchError):
    """This worker's claim on a job was taken back; what it made must not be published."""

    code = "claim_lost"
