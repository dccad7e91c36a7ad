"""Small bugs that can be seeded into a module: one changed operator, constant, condition, argument or statement.

A mutant is a changed syntax tree that is compiled in memory. Its id contains the function and the two texts, not the
line, so that it survives edits elsewhere in the file.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType

_OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
_CONDITIONS = {"where", "and_", "or_"}
_REMOVABLE = (ast.AugAssign, ast.Raise, ast.Break, ast.Continue, ast.Delete)
_LOGGERS = {"log", "logger", "_log", "_logger", "logging", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """A change of one node: `node` is its position in `ast.walk`, `replacement` takes its place."""

    id: str
    line: int
    node: int
    replacement: ast.AST

    def compile(self, source: str, filename: str) -> CodeType:
        """Compile `source` with this change; the lines stay as they are."""
        tree = ast.parse(source)
        target = list(ast.walk(tree))[self.node]
        for parent in ast.walk(tree):
            for name, value in ast.iter_fields(parent):
                if value is target:
                    setattr(parent, name, self.replacement)
                elif isinstance(value, list):
                    setattr(parent, name, [self.replacement if item is target else item for item in value])
        return compile(ast.fix_missing_locations(tree), filename, "exec")


def find_mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of its lines."""
    tree = ast.parse(source)
    functions, excluded = _functions(tree), _excluded(tree)
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for position, node in enumerate(ast.walk(tree)):
        if node in excluded or not isinstance(node, ast.expr | ast.stmt):
            continue
        for replacement in _replacements(node):
            ast.copy_location(replacement, node)
            before, after = _text(node), _text(replacement)
            text = f"{functions.get(node, '')}: {before} -> {after}"
            seen[text] += 1
            suffix = f" #{seen[text]}" if seen[text] > 1 else ""
            found.append(Mutant(text + suffix, node.lineno, position, replacement))
    return sorted(found, key=lambda mutant: mutant.line)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If):  # its body would make the id long and change with it
        return f"if {_text(node.test)}"
    return " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())


def _functions(tree: ast.Module) -> dict[ast.AST, str]:
    """Return the dotted name of the class and function that contains each node."""
    names: dict[ast.AST, str] = {}

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            names[child] = inside
            is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            visit(child, f"{inside}.{child.name}".lstrip(".") if is_scope else inside)

    visit(tree, "")
    return names


def _excluded(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes without effect on results: annotations, decorators, formats, logging, and error texts."""
    roots: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            roots += [*node.decorator_list, node.returns]
        elif isinstance(node, ast.ClassDef):
            roots += node.decorator_list
        elif isinstance(node, ast.arg | ast.AnnAssign):
            roots.append(node.annotation)
        elif (
            isinstance(node, ast.JoinedStr)
            or (isinstance(node, ast.Expr) and _is_logging(node.value))
            or (isinstance(node, ast.If) and _text(node.test) == "TYPE_CHECKING")
        ):
            roots.append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript):
            roots += [node] if _is_type_alias(node) else []
    return {inner for root in roots if root is not None for inner in ast.walk(root)}


def _is_logging(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):  # a docstring
        return True
    return isinstance(node, ast.Call) and _text(node.func).split(".")[0] in _LOGGERS


def _is_type_alias(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id.lstrip("_")[:1].isupper() and not (
        node.targets[0].id.isupper()
    )  # fmt: skip


def _replacements(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    for applies, change in _OPERATORS:
        if isinstance(node, applies):
            yield from change(node)


def _compare(node: ast.Compare) -> Iterator[ast.expr]:
    for at, op in enumerate(node.ops):
        if type(op) in _OPPOSITE:
            changed = copy.deepcopy(node)
            changed.ops[at] = _OPPOSITE[type(op)]()  # type: ignore[call-overload]
            yield changed


def _operator(node: ast.BoolOp | ast.BinOp) -> Iterator[ast.expr]:
    if type(node.op) in _OPPOSITE:
        changed = copy.deepcopy(node)
        changed.op = _OPPOSITE[type(node.op)]()  # type: ignore[assignment]
        yield changed


def _negation(node: ast.UnaryOp) -> Iterator[ast.expr]:
    if isinstance(node.op, ast.Not):
        yield copy.deepcopy(node.operand)


def _constant(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)


def _condition(node: ast.If | ast.IfExp) -> Iterator[ast.expr | ast.stmt]:
    if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):  # those have mutants of their own
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _CONDITIONS:
        for at in range(len(node.args)):
            changed = copy.deepcopy(node)
            del changed.args[at]
            if changed.args:
                yield changed
            elif isinstance(changed.func, ast.Attribute):
                yield changed.func.value
    elif len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
        changed = copy.deepcopy(node)
        changed.args[:2] = reversed(changed.args[:2])
        if _text(changed) != _text(node) and name not in {"isinstance", "issubclass", "min", "max", "getattr", "cast"}:
            yield changed


def _removal(node: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(node, _REMOVABLE) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)):
        yield ast.Pass()


_OPERATORS: tuple[
    tuple[type[ast.AST] | tuple[type[ast.AST], ...], Callable[..., Iterator[ast.expr | ast.stmt]]], ...
] = (
    (ast.Compare, _compare),
    ((ast.BoolOp, ast.BinOp), _operator),
    (ast.UnaryOp, _negation),
    (ast.Constant, _constant),
    ((ast.If, ast.IfExp), _condition),
    (ast.Call, _arguments),
    (ast.stmt, _removal),
)
