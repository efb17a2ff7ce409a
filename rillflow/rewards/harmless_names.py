"""Harmless names: the builtins, modules and attributes with which no source can run text.

A name is listed if no argument can make it run text as code, start a process or write a file. Names that take
a path to write, evaluate annotations or look up attributes by a text are left out. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from functools import cache
from types import ModuleType


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS_BUILTINS = _words(
    "abs aiter all anext any ascii bin bool bytearray bytes callable chr classmethod complex dict "
    "divmod enumerate filter float format frozenset hash hex id int isinstance issubclass iter len list "
    "map max memoryview min next object oct ord pow print property range repr reversed round set slice "
    "sorted staticmethod str sum super tuple zip NotImplemented Ellipsis __debug__ __name__ __file__ "
    "__doc__"
) | {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
"""Builtins that are harmless in any use, among them all exceptions."""
SPECIAL = _words(
    "__name__ __qualname__ __doc__ __class__ __init__ __version__ __len__ __contains__ __getitem__ "
    "__iter__ __next__ __call__ __enter__ __exit__ __post_init__ __str__ __repr__ __eq__ __hash__ "
    "__file__"
)
"""Special attributes that lead to no code."""
LEADING = _words(
    "gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await cr_origin ag_frame ag_code ag_await "
    "tb_frame tb_next f_back f_builtins f_code f_globals f_locals f_trace func_globals get_loop "
    "subprocess_exec subprocess_shell"
)
"""Attributes that lead from a value to code, names or processes."""
WRITING = _words(
    "write_text write_bytes touch unlink rename symlink_to hardlink_to link_to tofile dump memmap chmod"
)
"""Methods of paths and arrays that change files."""
ASSIGNED = frozenset(("__all__", "__version__", "__author__", "__slots__", "__hash__"))
"""Special names that a file may bind."""

_WHOLE = _words(
    "abc bisect calendar cmath collections.abc colorsys decimal difflib fractions hashlib heapq "
    "itertools keyword math numbers queue re secrets statistics struct textwrap time unicodedata zlib "
    "base64 binascii html html.parser datetime urllib.parse regex ipaddress reprlib array graphlib "
    "rapidfuzz rapidfuzz.fuzz rapidfuzz.distance rapidfuzz.process Levenshtein editdistance"
)
"""Modules whose public names are all harmless."""
_LISTED = {
    "__future__": _words("annotations"),
    "ast": _words(
        "parse literal_eval walk dump unparse NodeVisitor NodeTransformer iter_child_nodes "
        "get_docstring get_source_segment"
    ),
    "asyncio": _words(
        "gather sleep wait_for wait as_completed Semaphore Lock Event Queue TimeoutError timeout "
        "CancelledError run"
    ),
    "collections": _words(
        "Counter OrderedDict defaultdict deque namedtuple ChainMap UserDict UserList UserString abc"
    ),
    "concurrent.futures": _words("ThreadPoolExecutor as_completed wait TimeoutError Future"),
    "contextlib": _words(
        "suppress contextmanager nullcontext closing ExitStack redirect_stdout redirect_stderr "
        "asynccontextmanager"
    ),
    "copy": _words("copy deepcopy"),
    "csv": _words(
        "reader writer DictReader DictWriter Error QUOTE_ALL QUOTE_MINIMAL QUOTE_NONE QUOTE_NONNUMERIC"
    ),
    "dataclasses": _words("dataclass field fields asdict astuple replace KW_ONLY is_dataclass"),
    "enum": _words("Enum IntEnum StrEnum Flag IntFlag auto unique"),
    "functools": _words(
        "cache cached_property lru_cache partial partialmethod reduce wraps total_ordering cmp_to_key"
    ),
    "io": _words("StringIO BytesIO"),
    "json": _words("loads dumps load dump JSONDecodeError JSONDecoder JSONEncoder"),
    "json.decoder": _words("JSONDecodeError JSONDecoder"),
    "logging": _words(
        "getLogger debug info warning error exception critical DEBUG INFO WARNING ERROR CRITICAL Logger"
    ),
    "math_verify": _words("parse verify LatexExtractionConfig ExprExtractionConfig StringExtractionConfig"),
    "operator": _words(
        "add sub mul truediv floordiv mod neg pos pow eq ne lt le gt ge and_ or_ xor not_ truth "
        "contains itemgetter getitem concat is_ is_not index"
    ),
    "os": _words("environ getenv path cpu_count getpid sep linesep PathLike fspath"),
    "os.path": _words(
        "join basename dirname exists isfile isdir abspath realpath expanduser splitext split normpath "
        "relpath getsize commonprefix commonpath isabs"
    ),
    "pathlib": _words("Path PurePath PurePosixPath PosixPath"),
    "pprint": _words("pformat pprint"),
    "random": _words(
        "random randint randrange choice choices sample shuffle uniform gauss seed Random betavariate "
        "expovariate normalvariate getrandbits"
    ),
    "rillflow_parts.scorers.math_answers": _words("math_verify"),
    "shlex": _words("split quote join"),
    "string": _words(
        "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits octdigits printable punctuation "
        "whitespace capwords Template"
    ),
    "sys": _words(
        "stdout stderr maxsize float_info version_info version byteorder platform setrecursionlimit "
        "getrecursionlimit getsizeof intern argv maxunicode"
    ),
    "threading": _words("Lock RLock local Thread Event Semaphore BoundedSemaphore Condition current_thread"),
    "tokenize": _words("generate_tokens TokenError COMMENT NAME OP STRING NUMBER NEWLINE INDENT DEDENT"),
    "tomllib": _words("loads load TOMLDecodeError"),
    "traceback": _words("format_exc print_exc"),
    "types": _words("SimpleNamespace MappingProxyType NoneType"),
    "typing": _words(
        "Any AnyStr Callable ClassVar Dict Final FrozenSet Generic Iterable Iterator List Literal "
        "Mapping MutableMapping NamedTuple NoReturn Optional Protocol Sequence Set Tuple Type TypeVar "
        "TypedDict Union cast Generator Collection Annotated Awaitable Coroutine Hashable Self "
        "TypeAlias overload runtime_checkable TYPE_CHECKING NotRequired Required Never Deque "
        "DefaultDict Counter Text SupportsFloat SupportsInt AsyncIterator Pattern Match"
    ),
    "typing_extensions": _words("Any Literal NotRequired Required Self TypedDict override TypeAlias"),
    "uuid": _words("uuid4 UUID"),
    "warnings": _words("warn simplefilter filterwarnings"),
    "xml.etree.ElementTree": _words("fromstring XML Element SubElement tostring ParseError"),
    "yaml": _words("safe_load safe_load_all YAMLError"),
    "zoneinfo": _words("ZoneInfo"),
    "numpy": _words(
        "abs all allclose any arange argmax argmin argsort array asarray array_equal average bool_ ceil "
        "clip concatenate corrcoef cos cumsum diff divide dot e empty equal exp expand_dims eye finfo "
        "float16 float32 float64 floor full histogram hstack inf int32 int64 integer floating isclose "
        "isfinite isinf isnan linalg linspace log log10 log1p log2 max maximum mean median min minimum "
        "multiply nan nan_to_num nanmax nanmean nanmin nanstd ndarray newaxis nonzero number ones "
        "ones_like outer percentile pi power prod quantile random ravel reshape round searchsorted sign "
        "sin sort sqrt square squeeze stack std subtract sum tan tanh tile transpose unique var vstack "
        "where zeros zeros_like"
    ),
    "numpy.linalg": _words("norm det inv solve eig svd matrix_rank LinAlgError"),
    "numpy.random": _words("default_rng rand randn randint choice seed shuffle permutation uniform normal"),
    "torch": _words(
        "tensor as_tensor Tensor float16 bfloat16 float32 float64 int32 int64 bool long stack cat zeros "
        "ones zeros_like ones_like full arange mean std sum clamp sigmoid softmax log exp abs no_grad "
        "inference_mode where sqrt tanh max min isnan isfinite"
    ),
}
"""Modules with the public names that are harmless, and their harmless submodules."""


def is_listed(module: str) -> bool:
    """Return whether some names of a module, or of a submodule, are known to be harmless."""
    known = (*_LISTED, *_WHOLE)
    return any(each == module or each.startswith(f"{module}.") for each in known)


@cache
def harmless_names(module: str) -> frozenset[str]:
    """Return the names of a module that are known to be harmless; empty for any other module."""
    if module in _LISTED:
        names = _LISTED[module]
        return names | _nodes() if module == "ast" else names
    if module not in _WHOLE:
        return frozenset()
    try:
        held = importlib.import_module(module)
    except ImportError:
        return frozenset()
    every: list[str] = list(vars(held).get("__all__", ())) or [name for name in dir(held) if name[0] != "_"]
    return frozenset(name for name in every if not isinstance(vars(held).get(name), ModuleType))


def _nodes() -> set[str]:
    """Return the names of the classes of syntax nodes."""
    return {
        name for name, value in vars(ast).items() if isinstance(value, type) and issubclass(value, ast.AST)
    }
