"""What devices and links do: constants of clusters, costs of operations and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.hardware.calibration import (
        Calibration as Calibration,
        Measurements as Measurements,
        TimedAttention as TimedAttention,
        TimedCollective as TimedCollective,
        TimedProduct as TimedProduct,
        TimedStream as TimedStream,
        calibrate as calibrate,
    )
    from phalanx.simulate.hardware.calibration_hosts import (
        HostRows as HostRows,
        apart as apart,
        combined as combined,
        ranks_of_host as ranks_of_host,
    )
    from phalanx.simulate.hardware.clusters import (
        GpuCluster as GpuCluster,
        Hardware as Hardware,
        at as at,
        known_hardware as known_hardware,
        load_hardware as load_hardware,
        parse_cluster as parse_cluster,
    )
    from phalanx.simulate.hardware.collectives import (
        NCCL_SMS as NCCL_SMS,
        GroupSpan as GroupSpan,
        Network as Network,
        beside as beside,
        distinct as distinct,
        span_from as span_from,
        span_of as span_of,
    )
    from phalanx.simulate.hardware.cost import (
        BF16 as BF16,
        FP32 as FP32,
        SIGMA as SIGMA,
        Cost as Cost,
        Oracle as Oracle,
    )
    from phalanx.simulate.hardware.kernel_facts import (
        ADAM_CHUNK as ADAM_CHUNK,
        ATTENTION_BYTES as ATTENTION_BYTES,
        ATTENTION_CODE_BYTES as ATTENTION_CODE_BYTES,
        ATTENTION_LENGTHS as ATTENTION_LENGTHS,
        BLOCK as BLOCK,
        BLOCK_ROWS as BLOCK_ROWS,
        CORRECTION as CORRECTION,
        FAULT_BYTES as FAULT_BYTES,
        GENERATOR_BYTES as GENERATOR_BYTES,
        HOLES as HOLES,
        INTERPRETER_BYTES as INTERPRETER_BYTES,
        KEY_BLOCK as KEY_BLOCK,
        LARGEST_HEAP_BLOCK as LARGEST_HEAP_BLOCK,
        LEAST_OPEN as LEAST_OPEN,
        LIBRARY_BYTES as LIBRARY_BYTES,
        LOGIT_CHUNK as LOGIT_CHUNK,
        LOGIT_COLUMNS as LOGIT_COLUMNS,
        LOGIT_GROUP_BYTES as LOGIT_GROUP_BYTES,
        LONGEST_WARM as LONGEST_WARM,
        MAX_PIECE as MAX_PIECE,
        MAX_PRODUCTS as MAX_PRODUCTS,
        MAX_QUERIES as MAX_QUERIES,
        MOST_REARRANGED as MOST_REARRANGED,
        NOTED_PRODUCT_BYTES as NOTED_PRODUCT_BYTES,
        PREFETCH_STEPS as PREFETCH_STEPS,
        PREPARE_BYTES as PREPARE_BYTES,
        PRODUCT_BYTES as PRODUCT_BYTES,
        PRODUCT_CODE_BYTES as PRODUCT_CODE_BYTES,
        PROMPT_TOKENS as PROMPT_TOKENS,
        RATE_SIZES as RATE_SIZES,
        RECOMPUTE_BYTES as RECOMPUTE_BYTES,
        SAMPLE_TOKENS as SAMPLE_TOKENS,
        SCRIPT_BYTES as SCRIPT_BYTES,
        SPACE as SPACE,
        padded_rows as padded_rows,
        pieces as pieces,
    )
    from phalanx.simulate.hardware.routing import RouterModel as RouterModel, forced_loads as forced_loads
    from phalanx.simulate.hardware.slots import (
        ExpertSlots as ExpertSlots,
        RoutedRows as RoutedRows,
        expert_slots as expert_slots,
    )
else:
    __getattr__ = lazy(__name__)
