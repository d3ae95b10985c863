"""Storages that whoever manages them empties while a record of them lives."""

import torch

from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.records import Record
from mindspeed_mem.device import get_backend
from mindspeed_mem.device.slabs import HostSlabs


def test_an_emptied_storage_gets_no_memory_back_from_the_attempt_to_copy_it():
    backend = get_backend("cpu")
    micro_batch = MicroBatch(Mover(backend, HostSlabs(backend)), (0, 0))
    tensor = torch.ones(16)
    storage = tensor.untyped_storage()
    record = Record(micro_batch.mover, micro_batch, (0, "mlp", 1), storage, LEDGER.enter(storage, True), tensor)
    micro_batch.select(record, 1)
    storage.resize_(0)
    micro_batch.finish_forward()
    assert storage.nbytes() == 0 and record.state == "kept" and not micro_batch.mover.bytes_out
