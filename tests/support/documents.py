"""Small requests made on the spot, and the bodies that carry them."""

from bucketplan_core.collectives import Candidate, Group, Options
from bucketplan_core.profile import CostProfile, WorkClass
from bucketplan_core.request import Request
from bucketplan_core.wire import pack

MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
JSON = {"Content-Type": "application/json", "Accept": "application/json"}
SIZE = Options(strategy="size", planner="size/1", bucket_cap_bytes=64 * 1024, first_bucket_cap_bytes=64 * 1024)


def small_request(number: int = 0, *, num_candidates: int = 6, options: Options = SIZE) -> Request:
    """A forward graph of `num_candidates` gathers over 8 ranks, one before each segment; a graph a `number`."""
    candidates = [
        Candidate(
            kind="fsdp_all_gather",
            group="fsdp",
            group_size=8,
            dtype="bfloat16",
            device_type="cuda",
            reduce_op=None,
            input_shape=(128 + number, 4),
            output_shape=(1024 + 8 * number, 4),
            param_name=f"layers.{index}.weight",
            state_idx=index,
            ordinal=index,
            module_fqns=(f"layers.{index}",),
            backward=False,
            earliest_launch=0,
            launch=index,
            latest_launch=index,
            wait=index,
            latest_wait=index,
            first_use=index,
            last_use=index,
            launch_order=2 * index,
            wait_order=2 * index + 1,
        )
        for index in range(num_candidates)
    ]
    return Request.build(
        num_segments=num_candidates,
        groups=[Group(role="fsdp", size=8, strides=(1, 7))],
        candidates=candidates,
        fixed=[],
        options=options,
        phase="forward",
    )


def profile_of(request: Request, *, flops: int = 1_000) -> CostProfile:
    """A profile in which every segment costs `flops`."""
    segments = request.num_segments
    work = WorkClass(name="matmul:bfloat16", flops=(flops,) * segments, bytes_moved=(0,) * segments)
    return CostProfile(work=(work,), live_bytes=(0,) * segments, fixed_bytes=())


def plan_body(request: Request, profile: CostProfile | None = None) -> bytes:
    """The MessagePack body of `POST /v1/plans`."""
    return pack(
        {
            "profile": None if profile is None else profile.encoded,
            "request": request.encoded,
            "signature": request.signature,
        }
    )
