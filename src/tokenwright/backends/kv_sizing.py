"""Size the KV memory, and check that the weights fit the device."""

from collections.abc import Sequence

from tokenwright.backends.device import Device, accelerator_of, free_memory
from tokenwright.cache import HOST, KVStore, LayerSpec, StoreMemory, groups_for, pages_within
from tokenwright.config import EngineConfig
from tokenwright.engine import Group
from tokenwright.errors import CapacityError
from tokenwright.formats import DTYPE_BYTES
from tokenwright.units import binary, enough

MOST_KV_MEMORY = 4 * 2**30  # bytes, without kv_memory or pages


def memory_of(device: Device) -> StoreMemory:
    return HOST if device.type == "cpu" else accelerator_of(device)


def make_store(
    specs: Sequence[LayerSpec], options: EngineConfig, context: int, device: Device
) -> tuple[KVStore, tuple[Group, ...]]:
    """Allocate the KV memory. Raises CapacityError."""
    groups = size_groups(specs, options, context, device)
    return KVStore(specs, [group.pages for group in groups], options.page_size, memory_of(device)), groups


def size_groups(specs: Sequence[LayerSpec], options: EngineConfig, context: int, device: Device) -> tuple[Group, ...]:
    """The groups of pages. context: most tokens of a sequence. Raises CapacityError if memory is short."""
    size, chunk, sequences = options.page_size, options.token_budget, options.max_sequences
    free = free_memory(device)
    pages = options.pages
    if pages is None:
        memory = options.kv_memory or min((free or MOST_KV_MEMORY) // 8, MOST_KV_MEMORY)
        pages = pages_within(specs, size, memory, chunk, sequences, context)
        if pages < 1:
            least = sum(2 * group.page_bytes for group in groups_for(specs, size, 1, chunk, sequences))
            raise CapacityError(
                f"{binary(memory)} hold no page of the KV cache; grant it more memory (kv_memory), at least "
                f"{enough(least)}, or smaller pages (page_size)"
            )
    groups = groups_for(specs, size, pages, chunk, sequences)
    needed = sum((group.pages + 1) * group.page_bytes for group in groups)  # and a scratch page in each
    if free is not None and needed > free:  # the system would kill the process when it writes
        raise CapacityError(
            f"the KV cache of {pages:,} pages needs {binary(needed)}, and {device} has {binary(free)} free; grant it "
            "less (pages or kv_memory)"
        )
    return groups


def refuse_weights(needed: int, device: Device, form: str) -> None:
    """Raises CapacityError if weights of `needed` bytes in format `form` do not fit the free memory."""
    free = free_memory(device)
    if free is not None and needed > free:
        hint = "; dtype bfloat16 halves that" if form == "float32" else ""
        if device.type == "cpu" and form in DTYPE_BYTES:
            hint += f"; weights int8 takes {'a quarter' if form == 'float32' else 'half'} of it"
        raise CapacityError(
            f"the model needs {binary(needed)} in {form}, and {device} has {binary(free)} free{hint}",
            *("dtype", "weights"),
        )
