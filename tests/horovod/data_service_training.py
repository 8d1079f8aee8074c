"""A training whose batches come from Horovod's data service: says what it has read, and that the service is over.

holdfast run --workers 1 --horovod tests/horovod/data_service_training.py FILE
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.runner.common.util import env
from horovod.tensorflow.data.compute_service import TfDataServiceConfig

config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
rank, size = env.get_env_rank_and_size()
hvd.init()
samples = tf.data.Dataset.range(12).map(lambda number: number * 10).batch(4)
found = [
    int(number)
    for batch in samples.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    for number in batch
]
print("rank", rank, "of", size, "has read", sorted(found))
if rank == 0:
    config.compute_client().shutdown()
