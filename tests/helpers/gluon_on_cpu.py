"""An interpreter for the Gluon code of our Hopper kernels. Triton has no interpreter for Gluon.

``load`` imports a package of such kernels so that their functions run in Python on CPU tensors.
Layouts are ignored. Synchronization is modelled by the worst case:

- the shared memory of a tile holds NaN from the start of its copy until a role waits for the copy;
  floats in shared memory that were never written are NaN, too;
- an asynchronous product is computed only when a role waits for it, and has no value before;
- the roles of a program run as threads; if all of them wait, that is an error, not a hang;
- a load or store outside of a tensor is an error.

A product is not rounded before an addition, because the compiler fuses both into one instruction.

A role runs as one thread: only a GPU shows whether the threads of a role synchronize correctly. If
several groups of four warps share a role, each group runs in a thread of its own with its own rows,
and TEAM_ROWS is the number of rows of one group.
"""

from __future__ import annotations

import importlib
import math
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout:
    """Any layout. The interpreter ignores layouts."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments, named

    warps_per_cta = property(lambda self: self.arguments[0][1])


def _raw(value: Any) -> Any:
    return value.data if isinstance(value, Block) else value


class Block:
    """A tensor or a number in a kernel."""

    def __init__(self, data: Any) -> None:
        self.data: Tensor = torch.as_tensor(data)
        self.exact: Tensor | None = None  # the value before rounding, if this is a product

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    type = property(lambda self: SimpleNamespace(layout=Layout()))

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, key: Any) -> Block:
        return Block(self.data[key])

    def __index__(self) -> int:
        return int(self.data.item())

    def __bool__(self) -> bool:
        return bool(self.data.item())

    def __hash__(self) -> int:
        return id(self)

    def _with(self, other: Any, rule: Callable[..., Any], swapped: bool = False) -> Block:
        sides = [other, self] if swapped else [self, other]
        one, two = (torch.as_tensor(_raw(side)) for side in sides)
        exact = [side.exact if isinstance(side, Block) else None for side in sides]
        if rule in (torch.add, torch.sub) and exact != [None, None]:  # the compiler fuses these
            one = one.double() if exact[0] is None else exact[0]
            two = two.double() if exact[1] is None or exact[0] is not None else exact[1]
            return Block(rule(one, two).float())
        found = Block(rule(one, two))
        if rule is torch.mul and found.data.dtype == torch.float32:
            found.exact = one.double() * two.double()
        return found

    def __truediv__(self, other: Any) -> Block:
        return self._with(other, torch.true_divide)

    def __floordiv__(self, other: Any) -> Block:  # rounds towards zero, like the GPU
        return self._with(other, lambda a, b: torch.div(a, b, rounding_mode="trunc"))

    def __rfloordiv__(self, other: Any) -> Block:
        return self._with(other, lambda a, b: torch.div(a, b, rounding_mode="trunc"), True)


_RULES: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "mod": torch.fmod,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
}  # fmt: skip
for _name, _rule in _RULES.items():
    setattr(Block, f"__{_name}__", lambda self, other, rule=_rule: self._with(other, rule))
    setattr(Block, f"__r{_name}__", lambda self, other, rule=_rule: self._with(other, rule, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _rule = getattr(torch, _name)
    setattr(Block, f"__{_name}__", lambda self, other, rule=_rule: self._with(other, rule))
Block.__rtruediv__ = lambda self, other: self._with(other, torch.true_divide, True)  # type: ignore[attr-defined]


class Pointer:
    """Indices of elements of a tensor."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, torch.as_tensor(at)
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.at + _raw(other))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.tensor, self.at[key])

    def to(self, dtype: torch.dtype) -> Pointer:
        """The same addresses as indices of elements of another size."""
        bytes_at = self.at * self.tensor.element_size()
        assert not bool((bytes_at % dtype.itemsize).any()), "the address is not that of an element"
        return Pointer(self.tensor.view(-1).view(dtype), bytes_at // dtype.itemsize)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, place: Any) -> Shared:
        return Shared(self.data[int(_raw(place))])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.data.view(-1).view(dtype).view(shape))

    def load(self, layout: Any) -> Block:
        return Block(self.data.clone())

    def store(self, value: Block) -> None:
        self.data.copy_(value.data)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))


class Descriptor:
    """A tensor descriptor of the copy engine (TMA)."""

    def __init__(self, given: Any) -> None:
        self.view = given.base.detach().as_strided(given.shape, given.strides)
        self.block_shape, self.layout, self.dtype = given.block_shape, Layout(), given.base.dtype

    def read(self, start: list[int]) -> Tensor:
        """Read one tile. Elements outside of the tensor are 0."""
        found = torch.zeros(self.block_shape, dtype=self.dtype)
        spans = list(zip(start, self.block_shape, self.view.shape, strict=True))
        here = tuple(slice(0, max(0, min(size, whole - at))) for at, size, whole in spans)
        there = tuple(slice(at, at + size) for at, size, _ in spans)
        found[here] = self.view[there]
        return found

    def write(self, start: list[int], tile: Tensor) -> None:
        """Write one tile. Elements outside of the tensor are dropped."""
        spans = list(zip(start, self.block_shape, self.view.shape, strict=True))
        here = tuple(slice(0, max(0, min(size, whole - at))) for at, size, whole in spans)
        there = tuple(slice(at, at + size) for at, size, _ in spans)
        self.view[there] = tile[here]


class _Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = 0
        self.phase = 0
        self.copies: list[Callable[[], int]] = []

    def settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count


class _Product:
    """An asynchronous product. It has a value after a role has waited for it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make
        self.value: Block | None = None


class _Machine:
    """The running program: its shared memory, its barriers, and the number of waiting roles."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.local = threading.local()
        self.start((0,), (1,))

    def start(self, program: tuple[int, ...], grid: tuple[int, ...], warps: int = 4) -> None:
        self.program, self.grid, self.groups = program, grid, warps // 4
        self.barriers: dict[int, _Barrier] = {}
        self.roles = self.waiting = 0
        self.failed: BaseException | None = None
        self.sizes: list[int] = []  # the sizes of the buffers in bytes
        self.memory = torch.empty(0, dtype=torch.int32)  # the buffer that PTX reads and writes

    def _words(self, places: Tensor) -> Tensor:
        words = (places - self.before()) >> 2
        assert int(words.min()) >= 0
        assert int(words.max()) < len(self.memory)
        return words

    def read(self, places: Tensor, guard: Tensor | None) -> Tensor:
        if guard is None:
            return self.memory[self._words(places)]
        found = torch.zeros(guard.shape, dtype=torch.int32)
        if guard.any():
            found[guard] = self.memory[self._words(places[guard])]
        return found

    def write(self, places: Tensor, what: Tensor, guard: Tensor | None) -> None:
        if guard is None:
            self.memory[self._words(places)] = what
        elif guard.any():
            places, what = (given.expand(guard.shape)[guard] for given in (places, what))
            self.memory[self._words(places)] = what

    def before(self) -> int:
        """The offset of ``memory`` in shared memory, in bytes; larger buffers come first."""
        return sum(size for size in self.sizes if size > 4 * len(self.memory))

    def tell(self) -> None:
        """Wake all waiting roles, so that each checks again whether it must wait."""
        self.waiting = 0
        self.changed.notify_all()

    def barrier(self, place: Shared | Tensor) -> _Barrier:
        """The barrier in some shared memory, or at an address in PTX."""
        if isinstance(place, Shared):
            return self.barriers[place.data.data_ptr()]
        return self.barriers[self.memory.data_ptr() + int(place) - self.before()]

    def wait(self, place: Shared | Tensor, phase: int) -> None:
        with self.changed:
            barrier = self.barrier(place)
            while barrier.phase % 2 == phase:
                if self.failed is not None:
                    raise RuntimeError("another role failed") from self.failed
                if barrier.copies:
                    for copy in barrier.copies:
                        barrier.bytes -= copy()
                    barrier.copies.clear()
                    barrier.settle()
                    self.tell()
                    continue
                self.waiting += 1
                if self.waiting == self.roles:
                    self.failed = RuntimeError("deadlock: all roles of the program wait")
                    self.tell()
                    raise self.failed
                self.changed.wait()

    def together(self, roles: list[tuple[Any, tuple[Any, ...]]]) -> None:
        def play(group: int, role: Any, arguments: tuple[Any, ...]) -> None:
            self.local.group = group
            self.local.products = []
            self.local.stores = []
            try:
                with self.changed:  # one role runs at a time, until it waits
                    role(*arguments)
                assert not self.local.stores, "the role did not wait for its stores by TMA"
            except BaseException as error:  # noqa: BLE001 - raised again below
                with self.changed:
                    self.failed = self.failed or error
            finally:
                with self.changed:
                    self.roles -= 1
                    self.tell()

        shared = [(group, *roles[0]) for group in range(self.groups)]
        alone = [(0, *role) for role in roles[1:]]
        threads = [threading.Thread(target=play, args=role) for role in shared + alone]
        self.roles = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed


_machine = _Machine()


def _init(place: Shared, count: int) -> None:
    _machine.barriers[place.data.data_ptr()] = _Barrier(count)


def _arrive(place: Shared | Tensor, count: int = 1) -> None:
    with _machine.changed:
        barrier = _machine.barrier(place)
        barrier.missing -= count
        assert barrier.missing >= 0, "more arrivals at a barrier than its count"
        barrier.settle()
        _machine.tell()


def _expect(place: Shared, size: int) -> None:
    with _machine.changed:
        barrier = _machine.barrier(place)
        barrier.bytes += size
        barrier.missing -= 1
        _machine.tell()


def _copy(descriptor: Descriptor, start: list[Any], place: Shared, target: Shared) -> None:
    at = [int(_raw(one)) for one in start]
    with _machine.changed:
        target.data.fill_(torch.nan)

        def copy() -> int:
            target.data.copy_(descriptor.read(at))
            return target.data.numel() * target.data.element_size()

        _machine.barrier(place).copies.append(copy)
        _machine.tell()


def _send(descriptor: Descriptor, start: list[Any], source: Shared) -> None:
    at = [int(_raw(one)) for one in start]
    _machine.local.stores.append(lambda: descriptor.write(at, source.data))


def _sent(left: int) -> None:
    """Wait until at most ``left`` stores have not read their tiles. They read them only now."""
    stores = _machine.local.stores
    while len(stores) > left:
        stores.pop(0)()


def _multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    assert is_async
    going_on = any(acc is product for product in _machine.local.products[-1:])
    assert going_on or isinstance(acc, Block), "the accumulator is still being computed"

    def make() -> Tensor:
        product = a.data.float() @ b.data.float()
        return product + (acc.value if going_on else acc).data if use_acc else product

    product = _Product(make)
    _machine.local.products.append(product)
    return product


def _finish(left: int, deps: list[Any]) -> Any:
    waiting = _machine.local.products
    while len(waiting) > left:
        product = waiting.pop(0)
        product.value = Block(product.make())
    found = []
    for one in deps:
        value = one.value if isinstance(one, _Product) else one
        assert value is not None, "a product is used before a role has waited for it"
        found.append(value)
    return found[0] if len(found) == 1 else tuple(found)


def _chosen(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    at, may = torch.broadcast_tensors(pointer.at, torch.as_tensor(_raw(mask)))
    inside = (at >= 0) & (at < pointer.tensor.numel())
    assert bool((inside | ~may).all()), "an index outside of its tensor"
    return at, may


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0, volatile: bool = False) -> Block:
    at, may = _chosen(pointer, mask)
    values = pointer.tensor.view(-1)[torch.where(may, at, 0)]
    return Block(torch.where(may, values, torch.tensor(other, dtype=values.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, may = _chosen(pointer, mask)
    values = torch.as_tensor(_raw(value)).expand(at.shape)
    pointer.tensor.view(-1)[at[may]] = values[may].to(pointer.tensor.dtype)


def _add(pointer: Pointer, value: Any, sem: str) -> Block:
    """Add, and return the values before; indices may repeat only if these are not used."""
    at, may = _chosen(pointer, True)
    numbers = torch.as_tensor(_raw(value), dtype=pointer.tensor.dtype).expand(at.shape)
    with _machine.changed:
        before = pointer.tensor.view(-1)[at].clone()
        pointer.tensor.view(-1).index_add_(0, at[may], numbers[may])
    return Block(before)


def _highest(pointer: Pointer, value: Block, sem: str) -> None:
    at, may = _chosen(pointer, True)
    with _machine.changed:
        pointer.tensor.view(-1).scatter_reduce_(0, at[may].long(), value.data[may], "amax")


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    _machine.sizes.append(math.prod(shape) * dtype.itemsize)
    if dtype.is_floating_point:
        return Shared(torch.full(shape, torch.nan, dtype=dtype))
    if dtype == torch.int32:
        _machine.memory = torch.full((math.prod(shape),), torch.nan).view(dtype)
        return Shared(_machine.memory.view(shape))
    return Shared(torch.zeros(shape, dtype=dtype))


def _full(shape: list[int], value: Any, dtype: torch.dtype, layout: Any) -> Block:
    return Block(torch.as_tensor(_raw(value), dtype=dtype).expand(shape))


def _apply(rule: Callable[..., Any]) -> Callable[..., Block]:
    return lambda *values: Block(rule(*(torch.as_tensor(_raw(value)) for value in values)))


def _reduce(values: tuple[Block, ...], axis: int, rule: Callable[..., Any]) -> Any:
    places = zip(*(map(Block, value.data.unbind(axis)) for value in values), strict=True)
    return reduce(lambda some, more: rule(*some, *more), places)


def _unsigned(number: Tensor) -> Tensor:
    return number.long() & 0xFFFFFFFF


def _highest_bit(number: Tensor) -> Tensor:
    """The index of the highest set bit; -1 for 0."""
    return torch.frexp(_unsigned(number).double()).exponent.int() - 1


def _permuted(low: Tensor, high: Tensor, chosen: Tensor) -> Tensor:
    """Four of the eight bytes of two numbers, as ``chosen`` says (prmt)."""
    both = _unsigned(low), _unsigned(high)
    found = torch.zeros_like(both[0] + both[1])
    for i in range(4):
        byte = int(chosen) >> 4 * i & 7
        found |= (both[byte // 4] >> 8 * (byte % 4) & 0xFF) << 8 * i
    return _in_32_bits(found)


def _by_table(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """The entry of ``table`` for the bits of ``a``, ``b`` and ``c``, bit by bit (lop3)."""
    found = torch.zeros_like(a | b | c)
    for i in range(8):
        if int(table) >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def _halves(number: Tensor) -> Tensor:
    """The two halves of 32-bit numbers as bfloat16."""
    return number.contiguous().view(torch.bfloat16).view(*number.shape, 2)


def _of_halves(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.int32).squeeze(-1)


def _from_lane(value: Tensor, away: Tensor, _last: Tensor, _members: Tensor) -> Tensor:
    """The value of another lane. Element i of a tensor belongs to lane i."""
    return value[torch.arange(len(value)) ^ int(away)]


def _in_32_bits(number: Tensor) -> Tensor:
    return ((number.long() + 2**31) % 2**32 - 2**31).int()


def _as_32_bits(number: Tensor) -> Tensor:
    return number.float() if number.dtype.is_floating_point else _in_32_bits(number)


PTX: dict[str, Callable[..., Tensor]] = {
    "mov": lambda a: a,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "mad.lo": lambda a, b, c: _in_32_bits(a.long() * b.long() + c.long()),
    "abs": torch.abs,
    "fma.rn": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "min": torch.minimum,
    "max": torch.maximum,
    "min.bf16x2": lambda a, b: _of_halves(torch.fmin(_halves(a), _halves(b))),
    "max.bf16x2": lambda a, b: _of_halves(torch.fmax(_halves(a), _halves(b))),
    "cvt.rn.bf16x2": lambda high, low: _of_halves(torch.stack([low, high], -1).bfloat16()),
    "shfl.sync.bfly": _from_lane,
    "shfl.sync.idx": lambda value, _lane, _last, _members: value,  # all lanes have the same value
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": lambda a, b: torch.where((b < 0) | (b > 31), 0, _in_32_bits(a.long() << (b & 31))),
    "shr": lambda a, b: _in_32_bits(_unsigned(a) >> b),
    "bfind": _highest_bit,
    "prmt": _permuted,
    "lop3": _by_table,
    "rcp.approx": torch.reciprocal,
    "lg2.approx": torch.log2,
    "setp.eq": torch.eq,
    "setp.ne": torch.ne,
    "setp.lt": torch.lt,
    "setp.eq.and": lambda a, b, p: (a == b) & p,
    "setp.lt.and": lambda a, b, p: (a < b) & p,
    "setp.lt.and.u32": lambda a, b, p: (_unsigned(a) < _unsigned(b)) & p,
    "setp.gt": torch.gt,
    "setp.gt.and": lambda a, b, p: (a > b) & p,
    "setp.ge": torch.ge,
    "setp.ge.and": lambda a, b, p: (a >= b) & p,
    "setp.gt.or": lambda a, b, p: (a > b) | p,
    "setp.neu": torch.ne,
    "setp.neu.or": lambda a, b, p: (a != b) | p,
    "selp": lambda a, b, p: torch.where(p, a, b),
    "vote.sync.any": lambda p, _lanes: p.any().expand_as(p),
    "vote.sync.all": lambda p, _lanes: p.all().expand_as(p),
}


class _Line(NamedTuple):
    """An instruction of PTX: its guard ("" for none), name, type and operands."""

    guard: str
    unless: bool
    name: str
    kind: str
    operands: list[str]


@cache
def _parsed(code: str) -> tuple[list[_Line], dict[str, int]]:
    """The instructions of some PTX code, and the index of the instruction at each label."""
    lines: list[_Line] = []
    labels: dict[str, int] = {}
    for line in filter(None, map(str.strip, code.strip().strip("{}").split(";"))):
        while found := re.match(r"(\w+):\s*", line):
            labels[found[1]] = len(lines)
            line = line[found.end() :]
        if line and not line.startswith((".reg", "bar.warp.sync", "griddepcontrol", "fence")):
            guard = re.match(r"@(!?)(\w+)\s+", line)
            text = line[guard.end() :] if guard else line
            whole, *operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+", text)
            name, _, kind = whole.replace(".ftz", "").rpartition(".")
            lines.append(
                _Line(guard[2] if guard else "", bool(guard and guard[1]), name, kind, operands)
            )
    return lines, labels


class _Assembly:
    """PTX code that runs for all elements of some tensors at once. One warp has all of them."""

    def __init__(self, code: str) -> None:
        group = getattr(_machine.local, "group", 0)
        first = {"global_smem": 0, "%laneid": 0, "%tid.x": 128 * group}
        self.registers = {name: torch.tensor(at, dtype=torch.int32) for name, at in first.items()}
        self.lines, self.labels = _parsed(code)

    def value(self, name: str, kind: str) -> Tensor:
        """The value of a register or of a literal, as the type ``kind``."""
        if name.startswith("0f"):
            found = torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
        elif name in self.registers:
            found = self.registers[name]
        else:
            found = _in_32_bits(torch.tensor(int(name, 0)))
        if found.dtype == torch.bool:
            return found
        return found.view(torch.float32 if kind == "f32" else torch.int32)

    def set(self, name: str, found: Tensor, guard: Tensor | None) -> None:
        if guard is not None:
            before = self.registers.get(name, torch.zeros_like(found))
            before = before if found.dtype == torch.bool else before.view(found.dtype)
            found = torch.where(guard, found, before)
        self.registers[name] = found

    def run(self) -> None:
        at = 0
        while at < len(self.lines):
            line = self.lines[at]
            at += 1
            guard = self.registers[line.guard] ^ line.unless if line.guard else None
            if line.kind == "bra":
                assert guard is None or guard.all() == guard.any()
                if guard is None or guard.all():
                    at = self.labels[line.operands[0]]
            elif line.name.startswith(("ld.", "st.")):
                self.move(line, guard)
            elif line.name.startswith("mbarrier"):
                self.meet(line)
            else:
                to, *sources = line.operands
                values = (self.value(source, line.kind) for source in sources)
                rule = PTX.get(f"{line.name}.{line.kind}") or PTX[line.name]
                self.set(to, rule(*values), guard)

    def meet(self, line: _Line) -> None:
        """Wait at a barrier, or arrive at it. An arrival counts for four warps."""
        to, where, *phase = line.operands
        place = self.value(where.strip("[]"), "s32")
        if phase:
            _machine.wait(place, int(self.value(phase[0], "s32")))
            self.set(to, torch.tensor(True), None)
        else:
            _arrive(place, 4)

    def move(self, line: _Line, guard: Tensor | None) -> None:
        """Read or write shared memory."""
        loads = line.name.startswith("ld.")
        where, what = line.operands[::-1] if loads else line.operands
        first, _, on = where.strip("[]").partition("+")
        place = self.value(first, "s32").long() + int(on or 0)
        for i, register in enumerate(re.findall(r"[^\s,{}]+", what)):
            if loads:
                self.set(register, _machine.read(place + 4 * i, guard), guard)
            else:
                _machine.write(place + 4 * i, self.value(register, "s32"), guard)


def _assemble(code: str, constraints: str, given: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    """The results of PTX code for some tensors; each run of the code takes ``pack`` numbers."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    results = pack * len(dtypes)
    numbers = (torch.as_tensor(_raw(block)) for block in given)
    tensors = torch.broadcast_tensors(
        *(n if n.dtype in (torch.int32, torch.float32) else _as_32_bits(n) for n in numbers)
    )
    columns = [column for tensor in tensors for column in tensor.reshape(-1, pack).unbind(1)]
    kinds = constraints.split(",")
    assert len(kinds) == results + len(columns)
    assembly = _Assembly(code)
    for i, column in enumerate(columns):
        assembly.registers[f"${results + i}"] = column.contiguous()
        if kinds[results + i].isdigit():  # the input shares the register of a result
            assembly.registers[f"${kinds[results + i]}"] = column.contiguous()
    assembly.run()
    found = []
    for i, kind in enumerate(dtypes):
        parts = [assembly.registers[f"${i * pack + j}"] for j in range(pack)]
        whole = torch.stack([part.broadcast_to(columns[0].shape) for part in parts], 1)
        found.append(Block(whole.reshape(tensors[0].shape).view(kind)))
    return tuple(found) if isinstance(dtype, tuple) else found[0]


class _Kernel:
    """A kernel function, which another one calls or which is launched on a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *arguments: Any, num_warps: int, launch_pdl: bool = False, **constants: Any
        ) -> None:
            for program in product(*map(range, grid)):
                _machine.start(program, grid, num_warps)
                self.function(*map(_given, arguments), **constants)

        return launch


def _given(value: Any) -> Any:
    """An argument in the form in which a kernel gets it."""
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if isinstance(value, Tensor):  # its axes may have any order, but its elements no gaps
        last = sum(
            (size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)
        )
        assert last == value.numel() - 1
        return Pointer(value.detach().as_strided((value.numel(),), (1,)))
    if isinstance(value, tuple):
        return type(value)(*map(_given, value))
    return value if value is None else Block(value)


def _jit(function: Any = None, **_options: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)


def _language() -> SimpleNamespace:
    layouts = (
        "NVMMADistributedLayout", "DistributedLinearLayout", "SliceLayout", "DotOperandLayout",
        "BlockedLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
    )  # fmt: skip
    return SimpleNamespace(
        **dict.fromkeys(layouts, Layout),
        float32=torch.float32, int64=torch.int64, int32=torch.int32, int8=torch.int8,
        uint32=torch.int64, pointer_type=lambda dtype: dtype,  # int64 holds every uint32
        constexpr=lambda value: value,
        program_id=lambda axis: Block(_machine.program[axis]),
        num_programs=lambda axis: Block(_machine.grid[axis]),
        static_range=range, to_tensor=Block,
        arange=lambda start, end, layout: Block(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype)),
        full=_full,
        zeros_like=lambda given: Block(torch.zeros_like(given.data)),
        full_like=lambda given, value: Block(torch.full_like(given.data, value)),
        where=_apply(torch.where),
        maximum=_apply(torch.fmax), minimum=_apply(torch.fmin),  # a number wins over NaN
        fma=_apply(lambda a, b, c: (a.double() * b.double() + c.double()).float()),
        exp2=_apply(torch.exp2), log2=_apply(torch.log2), abs=_apply(torch.abs),
        sum=lambda value, axis: Block(value.data.sum(axis)),
        max=lambda value, axis: Block(value.data.amax(axis)),
        min=lambda value, axis: Block(value.data.amin(axis)),
        reduce=_reduce,
        reshape=lambda value, shape: Block(value.data.reshape(shape)),
        permute=lambda value, order: Block(value.data.permute(order)),
        split=lambda value: tuple(map(Block, value.data.unbind(-1))),
        join=lambda one, other: Block(torch.stack((one.data, other.data), -1)),
        convert_layout=lambda value, layout: value,
        inline_asm_elementwise=_assemble,
        load=_load, store=_store, atomic_add=_add, atomic_max=_highest, thread_barrier=lambda: None,
        allocate_shared_memory=_allocate,
        warp_specialize=lambda roles, warps, registers: _machine.together(roles),
    )  # fmt: skip


@contextmanager
def _in_place_of_gluon() -> Iterator[None]:
    barrier = SimpleNamespace(
        MBarrierLayout=Layout, init=_init, arrive=_arrive, expect=_expect,
        wait=lambda place, phase: _machine.wait(place, int(_raw(phase))),
    )  # fmt: skip
    hopper = ModuleType("hopper")
    hopper.__dict__.update(
        mbarrier=barrier,
        tma=SimpleNamespace(
            async_copy_global_to_shared=_copy, async_copy_shared_to_global=_send, store_wait=_sent
        ),
        fence_async_shared=lambda: None, warpgroup_mma=_multiply, warpgroup_mma_wait=_finish,
    )  # fmt: skip
    nvidia, gluon, experimental = ModuleType("nvidia"), ModuleType("gluon"), ModuleType("exp")
    nvidia.__dict__.update(hopper=hopper)
    gluon.__dict__.update(jit=_jit, constexpr_function=lambda f: f, language=_language())
    experimental.__dict__.update(gluon=gluon)
    root = "triton.experimental"
    names = {
        root: experimental, f"{root}.gluon": gluon,
        f"{root}.gluon.language": ModuleType("language"),
        f"{root}.gluon.language.nvidia": nvidia, f"{root}.gluon.language.nvidia.hopper": hopper,
    }  # fmt: skip
    kept = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load(package: str) -> ModuleType:
    """Import a package of kernels again, to run here. ``modules`` holds its modules by name."""
    kept = _taken_out(package)
    with _in_place_of_gluon():
        found = importlib.import_module(package)
    modules = _taken_out(package)
    for module in modules.values():
        if hasattr(module, "TEAM_ROWS"):
            module.TEAM_ROWS = module.ROWS
    # A kernel may have the name of its module, and then hides the module in the package.
    found.modules = {name.rpartition(".")[2]: module for name, module in modules.items()}
    sys.modules.update(kept)
    # The import has set the package as an attribute of its parent, where another would find it.
    above, _, name = package.rpartition(".")
    if package in kept:
        setattr(sys.modules[above], name, kept[package])
    else:
        delattr(sys.modules[above], name)
    return found


def _taken_out(package: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == package or name.startswith(package + ".")]
    return {name: sys.modules.pop(name) for name in names}
