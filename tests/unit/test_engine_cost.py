"""What the engine takes of the host is counted where the host computes."""

from mindspeed_mem.activation.observe.engine_cost import measure_host_cost
from mindspeed_mem.activation.observe.rank_profile import HostCost
from mindspeed_mem.device import get_backend
from mindspeed_mem.device.cuda import CudaBackend


def test_a_tensor_and_an_operator_cost_whole_microseconds_on_a_cpu():
    found = measure_host_cost(get_backend("cpu"))
    assert 0 < found.moved_seconds < found.rerun_seconds
    assert all(round(one, 6) == one for one in (found.moved_seconds, found.rerun_seconds))


def test_beside_a_device_that_computes_by_itself_they_cost_nothing():
    assert measure_host_cost(CudaBackend()) == HostCost()
