"""The rules hold for every file of the package, and each rule catches a bad snippet."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.repo import rules
from tests.repo.source import SourceModule, package_modules, snippet


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule: rules.Rule) -> None:
    violations = [line for module in package_modules() for line in rule(module)]
    assert not violations, "\n" + "\n".join(violations)


def test_each_private_operator_has_one_home() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for module in package_modules():
        for _, name in rules.find_private_operators(module):
            homes[name].add(module.path)
    shared = {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1}
    assert not shared, f"touched in more than one file: {shared}"


BAD = {
    "no_globals": ["def f():\n    global counter\n    counter = 1", "from os.path import *"],
    "no_patching": [
        "import torch\ntorch.add = None",
        "import torch.nn.functional as F\nF.linear = None",
        "from torch import nn\nnn.Module.forward = None",
        "from torch.nn import Linear\nLinear.forward, x = None, 1",
        "import torch\ntorch.backends.cudnn.deterministic = True",
        "import torch\ndel torch.add",
        "import torch\nsetattr(torch.Tensor, 'add', None)",
        "def f(module):\n    type(module).forward = None",
        "def f(module):\n    module.__class__.forward = None",
        "import torch\ntorch.Tensor.__dict__['add'] = 1",
        "import torch\nwith open('x') as torch.add:\n    pass",
    ],
    "no_parameter_attributes": [
        "for p in model.parameters():\n    p.ds_id = 1",
        "def f(param):\n    param.data = None",
        "def f(old_param):\n    old_param.shard: int = 3",
        "def f(param):\n    setattr(param, 'x', 1)",
    ],
    "no_unsafe_calls": [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x', weights_only=True)",
        "from torch import save",
        "import torch as t\nt.save({}, 'x')",
        "eval('1')",
        "exec('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "f(weights_only=False)",
    ],
    "no_print": ["print('hello')", "def f():\n    return [print(x) for x in y]"],
    "no_private_fsdp": [
        "from torch.distributed.fsdp._fully_shard import FSDPState",
        "from torch.distributed.fsdp import _fully_shard",
        "import torch.distributed.fsdp._fully_shard._fsdp_state",
        "import torch\ntorch.distributed.fsdp._fully_shard",
        "def f(module):\n    return module._get_fsdp_state()",
        "getattr(module, '_get_fsdp_state')",
        "from torch.distributed._composable.fsdp import fully_shard",
    ],
    "no_private_operators": [
        "import torch\ntorch.ops.mkldnn._linear_pointwise(x)",
        "from torch import ops\nops.aten._scaled_dot_product(x)",
        "import torch\ntorch._fused_adamw_(x)",
        "import torch\ntorch._C._get_something()",
    ],
    "no_vendor_devices": [
        "import torch\ntorch.cuda.synchronize()",
        "x.to('cuda:0')",
        "if x.device.type == 'cuda':\n    pass",
        "if x.is_cuda:\n    pass",
    ],
    "annotated_public": [
        "def f(): pass",
        '"""Doc."""\ndef f(): pass',
        '"""Doc."""\nclass C:\n    def method(self): pass',
        '"""Doc."""\nclass C:\n    def __init__(self): pass',
        '"""Doc."""\ntry:\n    x = 1\n    def f(): pass\nexcept E: pass',
    ],
}

GOOD = {
    "no_patching": [
        "import torch\nx = torch.add\nself.torch = 1",
        "def f(module):\n    module.forward = None",
    ],
    "no_parameter_attributes": ["param.grad = None\nparam.requires_grad = False\nprocess.x = 1"],
    "no_unsafe_calls": ["model.eval()\nre.compile('x')\nimport torch\ntorch.compile(f)\nf(shell=False)"],
    "no_private_fsdp": ["from torch.distributed.fsdp import fully_shard", "x = 'fsdp'"],
    "no_private_operators": [
        "import torch\ntorch.ops.aten.mm.default\ntorch._foreach_norm(x)\ntorch.__version__",
    ],
    "no_vendor_devices": ["'CUDA graphs'\nx = 'CUDA_VISIBLE_DEVICES'\nx.is_cpu"],
    "annotated_public": [
        '"""Doc."""\ndef f() -> None:\n    def inner(): pass',
        '"""Doc."""\ndef _g(): pass\nclass _C:\n    def m(self): pass',
    ],
}


def _by_name(name: str) -> rules.Rule:
    return next(rule for rule in rules.RULES if rule.__name__ == name)


def test_each_rule_has_a_negative_control() -> None:
    assert set(BAD) == {rule.__name__ for rule in rules.RULES}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_bad_source_is_flagged(name: str, text: str) -> None:
    assert list(_by_name(name)(snippet(text)))


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in GOOD.items() for text in texts])
def test_good_source_is_not_flagged(name: str, text: str) -> None:
    assert not list(_by_name(name)(snippet(text)))


def test_homes_may_use_what_they_house() -> None:
    assert not list(rules.no_print(SourceModule("thalweg/cli/demo/__init__.py", "print(1)")))
    private = "from torch.distributed.fsdp._fully_shard import FSDPState"
    assert not list(rules.no_private_fsdp(SourceModule(rules.FSDP2_FILE, private)))
    operators = SourceModule("thalweg/ops/linear/functional.py", "import torch\ntorch.ops.mkldnn._linear_pointwise(x)")
    assert not list(rules.no_private_operators(operators))
