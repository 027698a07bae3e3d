"""Layer 0: the one error family. Every message says what is wrong, where, and the mend."""


class KvlabError(Exception):
    """Base of every error that kvlab raises on purpose; the command line prints it as one line, exit 2."""


class CaseError(KvlabError, ValueError):
    """A case, request or shape file that the grammar or the model does not admit."""


class CapacityError(KvlabError):
    """A case needs more KV blocks, tokens or memory than exist."""


class GeometryError(KvlabError):
    """A cache tensor whose block dimension is absent or ambiguous, or whose bytes overlap another group's."""


class FormatError(KvlabError):
    """A cache tensor whose byte format is unknown, or that does not fit its format."""


class FillError(KvlabError, ValueError):
    """A fill that cannot be parsed or applied."""


class EngineError(KvlabError):
    """An engine that cannot be loaded, or a step that it cannot run."""


class RunError(KvlabError):
    """A run folder that is missing, foreign, locked or full."""


class StudyError(KvlabError, ValueError):
    """Arguments of a check or a sweep that contradict each other."""
