"""Small requests, made by hand, that plan in no time."""

from bucketplan_core import Candidate, Group, Options, Request
from bucketplan_core.epoch import Epoch


def small_request(
    *, num_params: int = 4, group: str = "fsdp", dtype: str = "float32", cap_bytes: int = 10_000, rows: int = 8
) -> Request:
    """A forward graph that gathers `num_params` weights of 8 rows, each right before its use, over 2 ranks."""
    candidates = [
        Candidate(
            kind="fsdp_all_gather",
            group=group,
            group_size=2,
            dtype=dtype,
            device_type="cpu",
            input_shape=(rows // 2, 8),
            output_shape=(rows, 8),
            earliest_launch=0,
            launch=index,
            latest_launch=index,
            wait=index,
            latest_wait=index,
            first_use=index,
            last_use=index,
            launch_order=2 * index,
            wait_order=2 * index + 1,
            param_name=f"layers.{index}.weight",
            ordinal=index,
            state_idx=index,
            module_fqns=(f"layers.{index}",),
        )
        for index in range(num_params)
    ]
    return Request.build(
        num_segments=num_params,
        groups=[Group(role=group, size=2, strides=(1, 1))],
        candidates=candidates,
        fixed=[],
        options=Options(
            strategy="size", planner="size/1", bucket_cap_bytes=cap_bytes, first_bucket_cap_bytes=cap_bytes
        ),
        phase="forward",
    )


def small_epoch(*, job: str = "llama", overrides: dict[str, str] | None = None, cap_bytes: int = 10_000) -> Epoch:
    """An epoch of `job` with the options of `small_request`."""
    return Epoch.build(
        job=job,
        options=small_request(cap_bytes=cap_bytes).options,
        topology={"fsdp": 1},
        overrides=overrides or {},
    )
