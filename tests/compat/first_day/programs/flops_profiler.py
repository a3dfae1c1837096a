"""Operations and parameters of a model."""

import deepspeed
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from torch.nn.functional import mse_loss
from user_model import ROWS, WIDTH, batches, config, make_net

net = make_net()
flops, macs, params = get_model_profile(net, input_shape=(ROWS, WIDTH), print_profile=False, as_string=False, warm_up=1)
profiler = FlopsProfiler(net)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config())
counts = []
for step, (x, y) in enumerate(batches(engine.global_rank, engine.world_size)):
    if step == 2:
        profiler.start_profile()
    loss = mse_loss(engine(x), y)
    if step == 2:
        profiler.stop_profile()
        counts = [profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()]
        assert profiler.get_total_duration() > 0
        profiler.print_model_profile(profile_step=step)
        profiler.end_profile()
    engine.backward(loss)
    engine.step()
report = {"model": [flops, macs, params], "counts": counts}
