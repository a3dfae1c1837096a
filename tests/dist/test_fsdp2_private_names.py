"""The private names of FSDP2 that ``zero/_fsdp2.py`` uses; a failure says what this torch has changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import run_ranks
from thalweg.zero.fsdp2 import private_api


def _missing(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    private_api.lazy_init(model)
    (group,) = private_api.get_fsdp_groups(model)
    private_api.check_private_names([group])
    inner, missing = group._inner, []
    missing += [name for name in ("_reduce_dtype",) if not hasattr(inner, name)]  # known once groups are final
    for kind in ("module", "param_name", "shared_modules", "shared_param_names"):
        if not hasattr(inner.fsdp_params[0]._module_info, kind):
            missing.append(f"ParamModuleInfo.{kind}")
    # The home: an unsharded parameter that is there already is taken as it is, without a gather.
    home = torch.zeros(4, 4)
    group.params[0].set_unsharded_storage(home)
    group.params[1].set_unsharded_storage(torch.zeros(4))
    group.params[2].set_unsharded_storage(torch.zeros(4, 4))
    group.params[3].set_unsharded_storage(torch.zeros(4))
    group.to_unsharded()
    if model[0].weight.data_ptr() != home.data_ptr():
        missing.append("FSDPParam._unsharded_param as the home")
    group.to_sharded()
    if home.untyped_storage().size() == 0:
        missing.append("to_sharded() that leaves the home alone")
    return missing


def test_this_torch_has_the_names_that_are_used():
    assert run_ranks(_missing, 2) == [[], []]


def _without_a_name(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    groups = private_api.get_fsdp_groups(model)
    private_api.check_private_names(groups)
    del groups[0]._inner.fsdp_params[0]._sharding_spec
    try:
        private_api.check_private_names(groups)
    except RuntimeError as error:
        return str(error)


def test_a_torch_without_one_of_them_is_named_before_training():
    (said,) = run_ranks(_without_a_name, 1)
    assert f"torch {torch.__version__}" in said and "FSDPParam._sharding_spec is gone" in said and "2.15.0" in said
