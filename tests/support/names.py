"""What a program names, and whether it exists: without running it."""

import ast
import inspect
from importlib import import_module


class Instance:
    def __init__(self, kind):
        self.kind = kind


def problems(text):
    """Imports, attributes and keywords of a block that do not exist. Names that it does not define are the reader's."""
    names = {}

    def value(node):
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = value(node.value)
            kind = owner.kind if isinstance(owner, Instance) else owner
            if kind is None:
                return None
            if not hasattr(kind, node.attr):
                yield_problem(f"{ast.unparse(node)} does not exist")
                return None
            return getattr(kind, node.attr)
        if isinstance(node, ast.Call):
            called = value(node.func)
            owner = value(node.func.value) if isinstance(node.func, ast.Attribute) else None
            if inspect.isclass(called):
                return Instance(called)
            return Instance(owner) if inspect.isclass(owner) and inspect.ismethod(called) else None
        return None

    found = []
    yield_problem = found.append
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)
                names[alias.asname or alias.name] = import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    found.append(f"{node.module} has no {alias.name}")
                names[alias.asname or alias.name] = getattr(module, alias.name, None)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = value(node.value)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not callable(called := value(node.func)):
            continue
        try:
            parameters = inspect.signature(called).parameters.values()
        except ValueError:
            continue
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            continue
        known = {parameter.name for parameter in parameters}
        found += [
            f"{ast.unparse(node.func)} has no {word.arg}"
            for word in node.keywords
            if word.arg and word.arg not in known
        ]
    return found
