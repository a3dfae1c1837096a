"""The rules of the style guide as functions from one module to its violations.

Each returns lines ``path:line: what is wrong``.  They read the syntax tree, so they see what is written and
not what a clever program could do; tests/repo/test_rules.py has a bad snippet for each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from tests.repo.source import SourceModule, resolve_from

PARAMETER_NAMES = re.compile(r"^(p|param|parameter|.*_param|.*_parameter)$")
PARAMETER_ATTRIBUTES = {"grad", "requires_grad"}
UNSAFE_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {
    "torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save", "torch.jit.load",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load",
    "builtins.eval", "builtins.exec", "builtins.compile",
}  # fmt: skip
# Others' files of torch.save: read with weights_only=True (below it is False that is refused), and made of tensors.
TORCH_FILES = {
    "torch.load": "thalweg/checkpoint/deepspeed/torch_file.py",
    "torch.save": "thalweg/compat/deepspeed/fp32_weights.py",
}
FSDP2_FILE = "thalweg/zero/fsdp2/private_api.py"
OPS_FOLDER = "thalweg/ops/"
# Private names with a reason to be elsewhere than ops/, each in one file.
PRIVATE_NAME_FILES = {
    "_C._current_graph_task_id": "thalweg/zero/fsdp2/private_api.py",  # whether a backward pass runs, as FSDP2 asks
    "_C._swap_tensor_impl": "thalweg/deferred_init/tensor_swap.py",  # torch.utils.swap_tensors after its checks
    "_C._nn": "thalweg/deferred_init/deferred_tensor.py",  # the argument parser of nn.Module.to
    "_C._DisableTorchDispatch": "thalweg/deferred_init/deferred_tensor.py",  # the guard that FakeTensor is built with
}
DOCUMENTED_IDIOMS = {"_C._disabled_torch_function_impl"}  # documented as the way to write a tensor subclass
# Who may name a vendor's device: kernels, what mirrors torch's own names, and rooms that are not for training.
VENDOR_ROOMS = {"device", "ops", "compat", "infer", "serve", "plan"}
VENDOR_FILES = {
    "thalweg/deferred_init/deferred_tensor.py",  # Tensor.cuda()
    "thalweg/parallel/tensor/auto_plan/module_trace.py",  # Tensor.is_cuda
    "thalweg/checkpoint/model_state.py",  # a key of files that exist
}
PRIVATE_NAMESPACES = {"mkldnn", "mkl", "quantized", "onednn", "prepacked", "_quantized"}

Rule = Callable[[SourceModule], Iterator[str]]


def _violation(module: SourceModule, node: ast.AST, message: str) -> str:
    return f"{module.path}:{getattr(node, 'lineno', 1)}: {message}"


def no_globals(module: SourceModule) -> Iterator[str]:
    """No ``global`` and no star import."""
    for node in module.nodes:
        starred = isinstance(node, ast.ImportFrom) and any(item.name == "*" for item in node.names)
        if starred or isinstance(node, ast.Global):
            yield _violation(module, node, ast.unparse(node))


def no_patching(module: SourceModule) -> Iterator[str]:
    """Nothing of torch, and no class by way of an instance, is assigned to."""
    for node, target in _targets(module):
        if isinstance(target, ast.Subscript):
            target = target.value
        if not isinstance(target, ast.Attribute):
            continue
        name = module.dotted(target)
        if name is not None and name.split(".")[0] == "torch":
            yield _violation(module, node, f"assignment to {name}")
        owner = target.value
        by_type = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "type"
        if by_type or (isinstance(owner, ast.Attribute) and owner.attr == "__class__"):
            yield _violation(module, node, f"assignment to a class: {ast.unparse(target)}")
    for call in _calls(module):
        if _is_builtin(module, call, "setattr") and call.args:
            name = module.dotted(call.args[0])
            if name is not None and name.split(".")[0] == "torch":
                yield _violation(module, call, f"setattr on {name}")


def no_parameter_attributes(module: SourceModule) -> Iterator[str]:
    """Nothing is hung on a Parameter, and its ``data`` is not exchanged."""
    if module.path == FSDP2_FILE:  # its "params" are FSDP2's own FSDPParam objects
        return
    for node, target in _targets(module):
        if (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and PARAMETER_NAMES.match(target.value.id)
            and target.attr not in PARAMETER_ATTRIBUTES
        ):
            yield _violation(module, node, f"attribute {target.attr} set on {target.value.id}")
    for call in _calls(module):
        if (
            _is_builtin(module, call, "setattr")
            and call.args
            and isinstance(call.args[0], ast.Name)
            and PARAMETER_NAMES.match(call.args[0].id)
        ):
            yield _violation(module, call, f"setattr on {call.args[0].id}")


def no_unsafe_calls(module: SourceModule) -> Iterator[str]:
    """Data never executes: no pickle, no eval, no shell."""
    for node in module.nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{item.name}" for item in node.names)]
        for name in names:
            if name.split(".")[0] in UNSAFE_IMPORTS or name in UNSAFE_CALLS:
                yield _violation(module, node, f"import of {name}")
    for call in _calls(module):
        name = module.dotted(call.func)
        if isinstance(call.func, ast.Name) and call.func.id not in module.aliases:
            name = f"builtins.{call.func.id}"
        is_unsafe = name in UNSAFE_CALLS or (name or "").split(".")[0] in UNSAFE_IMPORTS
        if is_unsafe and TORCH_FILES.get(name or "") != module.path:
            yield _violation(module, call, f"call of {name}")
        for keyword in call.keywords:
            if keyword.arg in ("shell", "allow_pickle") and not _is_false(keyword.value):
                yield _violation(module, call, f"{keyword.arg}={ast.unparse(keyword.value)}")
            if keyword.arg == "weights_only" and _is_false(keyword.value):
                yield _violation(module, call, "weights_only=False")


def no_print(module: SourceModule) -> Iterator[str]:
    """Only the command line prints."""
    if module.subpackage == "cli":
        return
    for call in _calls(module):
        if _is_builtin(module, call, "print"):
            yield _violation(module, call, "print outside cli/")


def no_private_fsdp(module: SourceModule) -> Iterator[str]:
    """FSDP2's private names are touched in one file."""
    if module.path == FSDP2_FILE:
        return
    private = re.compile(r"^torch\.distributed\.fsdp(\.\w+)*\._|^torch\.distributed\._composable")
    for node in module.nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_from(module, node)
            names = [f"{base}.{item.name}" for item in node.names]
        elif isinstance(node, ast.Attribute):
            names = [module.dotted(node) or ""]
            if re.match(r"^_\w*fsdp", node.attr):
                yield _violation(module, node, f"private attribute {node.attr} outside {FSDP2_FILE}")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_\w*fsdp\w*", str(node.value)):
            yield _violation(module, node, f"private name {node.value!r} outside {FSDP2_FILE}")
        for name in names:
            if private.match(name):
                yield _violation(module, node, f"{name} outside {FSDP2_FILE}")


def no_private_operators(module: SourceModule) -> Iterator[str]:
    """torch's private operators are touched in ops/ alone (``torch._foreach_*`` is documented, so public)."""
    if module.path.startswith(OPS_FOLDER):
        return
    for node, name in find_private_operators(module):
        if PRIVATE_NAME_FILES.get(name) == module.path:
            continue
        yield _violation(module, node, f"private operator {name} outside {OPS_FOLDER}")


def find_private_operators(module: SourceModule) -> list[tuple[ast.AST, str]]:
    """The private operators of torch that a module names."""
    found = []
    for node in module.nodes:
        if not isinstance(node, ast.Attribute):
            continue
        parts = (module.dotted(node) or "").split(".")
        if parts[:2] == ["torch", "ops"] and len(parts) == 4:
            if parts[2] in PRIVATE_NAMESPACES or parts[3].startswith("_"):
                found.append((node, ".".join(parts[2:])))
        elif parts[:2] == ["torch", "_C"] and len(parts) == 3 and f"_C.{parts[2]}" not in DOCUMENTED_IDIOMS:
            found.append((node, f"_C.{parts[2]}"))
        elif parts[0] == "torch" and len(parts) == 2 and re.match(r"^_(?!foreach_|_|C$)", parts[1]):
            found.append((node, parts[1]))
    return found


def no_vendor_devices(module: SourceModule) -> Iterator[str]:
    """An accelerator is what ``torch.accelerator`` says: nobody asks whether it is CUDA."""
    if module.subpackage in VENDOR_ROOMS or module.path in VENDOR_FILES:
        return
    for node in module.nodes:
        named = isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")
        if named or (isinstance(node, ast.Constant) and re.fullmatch(r"cuda(:.*)?", str(node.value))):
            yield _violation(module, node, f"{ast.unparse(node)}: ask torch.accelerator or thalweg/device.py")


def annotated_public(module: SourceModule) -> Iterator[str]:
    """Public modules have docstrings, public functions return types."""
    if not module.name.split(".")[-1].startswith("_") and ast.get_docstring(module.tree) is None:
        yield f"{module.path}:1: no module docstring"
    bodies: list[list[ast.stmt]] = [module.tree.body]
    while bodies:
        for node in bodies.pop():
            public = not getattr(node, "name", "").startswith("_") or getattr(node, "name", "") == "__init__"
            if isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With) and public:
                bodies.append(node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and public and node.returns is None:
                yield _violation(module, node, f"{node.name} has no return type")


RULES: tuple[Rule, ...] = (
    no_globals,
    no_patching,
    no_parameter_attributes,
    no_unsafe_calls,
    no_print,
    no_private_fsdp,
    no_private_operators,
    no_vendor_devices,
    annotated_public,
)


def _calls(module: SourceModule) -> Iterator[ast.Call]:
    return (node for node in module.nodes if isinstance(node, ast.Call))


def _is_builtin(module: SourceModule, call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name and name not in module.aliases


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _targets(module: SourceModule) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each assignment or deletion with each of its targets, tuples taken apart."""
    for node in module.nodes:
        if isinstance(node, ast.Assign | ast.Delete):
            found = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            found = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            found = [node.optional_vars]
        else:
            continue
        while found:
            target = found.pop()
            if isinstance(target, ast.Tuple | ast.List):
                found.extend(target.elts)
            elif isinstance(target, ast.Starred):
                found.append(target.value)
            else:
                yield node, target
