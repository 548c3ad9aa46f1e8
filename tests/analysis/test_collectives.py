"""Bytes that are added over devices, read from what the compiler gives."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from bert.analysis.collectives import all_reduce_bytes

LOOP = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %both = (bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[]{:T(128)}) all-reduce(%x, %y), to_apply=%add
}

%condition (state: (s32[], bf16[4,8])) -> pred[] {
  %end = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%index, %end), direction=LT
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %loop = (s32[], bf16[4,8]) while(%start), condition=%condition, body=%body
  ROOT %last = f32[3] all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
}
"""
"""As the compiler of TPUs writes a loop: its rounds are the constant of the condition."""


def test_rounds_of_a_loop_are_counted() -> None:
    assert all_reduce_bytes(LOOP) == 5 * (2 * 4 * 8 + 4) + 4 * 3
    assert all_reduce_bytes(LOOP.replace("s32[]{:T(128)} constant(5)", "s32[]{:T(128)} copy(%end.1)")) is None


def test_a_program_of_this_machine_is_read() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))

    def body(rows: jax.Array) -> jax.Array:
        def add(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.lax.psum(jnp.sin(rows * total.mean()) * scale, "rows").mean(0), None

        total, _ = jax.lax.scan(add, jax.lax.psum(rows, "rows").sum(0), jnp.arange(6.0))
        return total

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec()))
    text = program.lower(jax.ShapeDtypeStruct((8, 5), jnp.float32)).compile().as_text()
    assert all_reduce_bytes(text) == (1 + 6) * 2 * 5 * 4
