"""What a name stands for, as far as text can tell: an optimizer, a loss, a count, a condition.

Values are made while code is read in order (`reading`). Two of them are the same thing when they
are the same object; what could not be told is `Unknown`, with the words it was written in.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from .conditions import Formula

# fmt: off
__all__ = [
    "Accelerator", "Bound", "Class", "Condition", "Const", "Context", "Criterion", "Function",
    "Index", "Instance", "Inverse", "Items", "Iterator", "Kind", "Length", "Loss", "Module",
    "Optimizer", "Params", "Remainder", "ScaleRead", "Scaled", "Scaler", "Schedule", "Scope",
    "Torch", "Unknown", "Value", "WindowSum", "Wrap", "key_of", "thing",
]
# fmt: on

Made = TypeVar("Made")


@dataclass_transform(eq_default=False)
def thing(cls: type[Made]) -> type[Made]:
    """A dataclass that is compared by identity.

    Without the methods that nobody calls, because making them is half the time that this package
    takes to load.

    """
    return dataclasses.dataclass(eq=False, repr=False, match_args=False)(cls)


class Value:
    """Anything that a name may stand for."""


@thing
class Unknown(Value):
    """Something that the text does not tell; `key` is how it was written."""

    key: str
    is_result: bool = False  # of a call: two calls give two things
    is_named: bool = False
    class_name: str = ""  # of the class outside the file that it was made of
    loss: Value | None = None  # what was written into its `loss`


@thing
class Const(Value):
    """A number, a text or None that is written out."""

    value: Any


@thing
class Torch(Value):
    """Something imported, by its full dotted name."""

    name: str


class Scope:
    """Names of one function, one class or one module, and where to look next."""

    __slots__ = ("names", "parent")

    def __init__(self, parent: Scope | None = None) -> None:
        self.names: dict[str, Value] = {}
        self.parent = parent

    def get(self, name: str) -> Value | None:
        """What a name stands for here."""
        scope: Scope | None = self
        while scope is not None:
            if (value := scope.names.get(name)) is not None:
                return value
            scope = scope.parent
        return None


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@thing
class Function(Value):
    """A function, a method or a lambda of the file."""

    node: FunctionNode
    scope: Scope
    owner: Class | None = None  # the class it is a method of


@thing
class Class(Value):
    """A class of the file."""

    node: ast.ClassDef
    scope: Scope
    bases: tuple[Value, ...]
    members: dict[str, Value]
    # Names that methods assign to: `self.optimizer = ...` in `setup`.
    writers: dict[str, list[Function]] = dataclasses.field(default_factory=dict)

    def find(self, name: str) -> Value | None:
        """A member of this class or of those it inherits from, as far as they are in the file."""
        if name in self.members:
            return self.members[name]
        for base in self.bases:
            if isinstance(base, Class) and (member := base.find(name)) is not None:
                return member
        return None

    def written_by(self, name: str) -> list[Function]:
        """Methods that assign `self.<name>`."""
        found = list(self.writers.get(name, ()))
        for base in self.bases:
            if isinstance(base, Class):
                found += base.written_by(name)
        return found

    def roots(self) -> list[str]:
        """The dotted names of the classes outside the file that it inherits from."""
        names = [base.name for base in self.bases if isinstance(base, Torch)]
        names += [base.key for base in self.bases if isinstance(base, Unknown)]
        for base in self.bases:
            if isinstance(base, Class):
                names += base.roots()
        return names


@thing
class Instance(Value):
    """An object of a class of the file."""

    cls: Class
    key: str
    attributes: dict[str, Value] = dataclasses.field(default_factory=dict)
    sought: set[str] = dataclasses.field(default_factory=set)


@thing
class Bound(Value):
    """A method of something: `optimizer.step` before it is called."""

    owner: Value
    name: str


@thing
class Items(Value):
    """A tuple, a list or the values of a dictionary."""

    items: list[Value]
    keys: list[str] | None = None
    is_list: bool = False


class Wrap(enum.Enum):
    """How a model is spread over ranks."""

    NONE = enum.auto()
    REPLICATED = enum.auto()
    SHARDED = enum.auto()


@thing
class Module(Value):
    """A model, or a layer of one."""

    key: str
    parts: tuple[Value, ...] = ()
    parent: Module | None = None
    inner: Value | None = None  # what a wrapper holds
    wrap: Wrap = Wrap.NONE
    node: ast.AST | None = None

    def bare(self) -> Value:
        """The model inside its wrappers."""
        value: Value = self
        while isinstance(value, Module) and value.inner is not None:
            value = value.inner
        return value


@thing
class Params(Value):
    """Parameters of modules, in a list or in something that can be read once."""

    modules: tuple[Value, ...]
    one_shot: bool
    whole: bool = True  # False: filtered, so a part of each module
    node: ast.expr | None = None
    used_up: bool = False
    born_in: int = 0  # number of loops around its making


@thing
class Optimizer(Value):
    """An optimizer that is made in sight."""

    key: str
    params: Value
    class_name: str
    node: ast.AST
    prepared: bool = False


@thing
class Scaler(Value):
    """A gradient scaler that is made in sight."""

    key: str
    enabled: bool = True


@thing
class Schedule(Value):
    """A schedule of the rate that is made in sight."""

    key: str
    class_name: str
    optimizer: Value | None
    horizon: tuple[ast.expr, ...]
    horizon_values: tuple[Value, ...]
    node: ast.AST
    resumes: bool = False  # it was given `last_epoch`


@thing
class Accelerator(Value):
    """The object of Accelerate that runs the backward."""

    key: str
    num_steps: Value | None  # gradient_accumulation_steps, when given


class Kind(enum.Enum):
    """What a loss is, as far as it is known."""

    MEAN = enum.auto()
    SUM = enum.auto()
    ELEMENTS = enum.auto()
    OTHER = enum.auto()


@thing
class Criterion(Value):
    """A loss before it is called."""

    kind: Kind
    unequal: str  # why its mean is over a number that changes, or empty
    class_name: str


@thing
class Loss(Value):
    """A tensor that may be a loss: what it is a mean of and what it was divided by."""

    kind: Kind
    node: ast.expr
    divisors: tuple[tuple[Value, ast.AST], ...] = ()
    unequal: str = ""  # why its mean is over a number that changes
    across_rows: bool = False
    scaled: bool = False  # multiplied by something that is not known
    masked: bool = False
    detached: bool = False
    reduced: bool = False  # summed over ranks
    roots: tuple[Value, ...] = ()  # what it was made from, to know it again
    times: tuple[str, ...] = ()  # keys of what it was multiplied by

    def with_(self, **changes: Any) -> Loss:
        """A copy with something changed, which still knows what it was made from."""
        return dataclasses.replace(self, **{"roots": (self, *self.roots), **changes})


@thing
class Scaled(Value):
    """A loss times the scale."""

    loss: Value
    scaler: Value


@thing
class Inverse(Value):
    """1 / something."""

    of: Value


@thing
class WindowSum(Value):
    """A sum over all microbatches of something that is looped over."""

    over: Value


@thing
class Length(Value):
    """`len(loader)`, plus a constant."""

    of: Value
    plus: int = 0


@thing
class Index(Value):
    """A number that grows by one with each pass through a loop."""

    key: str
    loop: int
    start: int | None  # in the first pass
    offset: int = 0  # what was added to it
    survives: bool = False  # a counter that is not set back with the loop
    resets: bool = False  # a counter that is set back when a window ends


@thing
class Remainder(Value):
    """`index % modulus`."""

    index: Value
    modulus: Value


@thing
class Condition(Value):
    """A truth value, as the question behind it."""

    formula: Formula


@thing
class ScaleRead(Value):
    """What `scaler.get_scale()` gave."""


@thing
class Context(Value):
    """What a `with` statement enters, and the condition under which it does."""

    name: str  # "no_sync", "accumulate", "null", "other"
    subject: Value | None = None
    formula: Formula | None = None  # active when true; None: always


@thing
class Iterator(Value):
    """What a `for` statement goes over."""

    over: Value
    start: int | None = 0
    is_enumerated: bool = False
    is_range: bool = False
    length: Value | None = None
    stride: Value | None = None


def key_of(value: Value | None) -> str:
    """The words for a value, equal for equal values.

    Args:
        value: Any; None gives an empty key.

    Example:
        >>> key_of(Const(4)), key_of(Unknown("args.k"))
        ('4', 'args.k')
    """
    if isinstance(value, Const):
        return repr(value.value)
    if isinstance(value, Length):
        return f"len({key_of(value.of)})" + (f" + {value.plus}" if value.plus else "")
    if isinstance(value, Torch):
        return value.name
    key = getattr(value, "key", None)
    return key if isinstance(key, str) else f"<{type(value).__name__} {id(value)}>"
