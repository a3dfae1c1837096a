"""How much memory the states of a model need, before there is a machine for it."""

import contextlib
import io

from deepspeed.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_live,
)
from user_model import make_net

text = io.StringIO()
with contextlib.redirect_stdout(text):
    estimate_zero3_model_states_mem_needs_all_live(make_net(), num_gpus_per_node=2, num_nodes=1)
    estimate_zero2_model_states_mem_needs_all_live(make_net(), num_gpus_per_node=2, num_nodes=1)
    estimate_zero3_model_states_mem_needs_all_cold(int(3e9), int(1e8), num_gpus_per_node=8)
cpu, gpu, largest = estimate_zero3_model_states_mem_needs(
    int(3e9), int(1e8), num_gpus_per_node=8, num_nodes=1, cpu_offload=True, cpu_offload_params=True
)
cpu2, gpu2 = estimate_zero2_model_states_mem_needs(int(3e9), num_gpus_per_node=8, num_nodes=1, cpu_offload=True)
report = {
    "stage 3": [cpu, gpu, largest],
    "stage 2": [cpu2, gpu2],
    "table": all(word in text.getvalue() for word in ("per CPU", "per GPU", "offload_optimizer=")),
}
