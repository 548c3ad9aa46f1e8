"""CRC-32C (Castagnoli; RFC 3720, B.4) in NumPy: hundreds of megabytes a second, without a compiled library.

A CRC's register is a linear function of the bits it has seen, so a message need not be read from front to back:
neighbouring words are merged in pairs, then the pairs, and so on, one vectorised step a level.
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_BLOCK = 1 << 20  # bytes merged at a time, so that the words stay in the cache
_MASK = 0xA282EAD8  # what TensorFlow's and LevelDB's formats add to a stored checksum


def crc32c(data: bytes | bytearray | memoryview | np.ndarray) -> int:
    """The checksum of bytes, given as a buffer or as a contiguous array of uint8."""
    octets = np.frombuffer(data, np.uint8)
    # The register starts as all ones, which is what four octets, computed once, make of a register of zeros; and from
    # zeros on, zeros in front change nothing, so they fill the first word.
    odd = len(octets) % 4
    start = (_prefix().to_bytes(4, "little") + octets[:odd].tobytes()).rjust(8, b"\0")
    register = _merge(np.frombuffer(start, "<u4"))
    for begin in range(odd, len(octets), _BLOCK):
        words = octets[begin : begin + _BLOCK].view("<u4").copy()
        words[0] ^= np.uint32(register)
        register = _merge(words)
    return register ^ 0xFFFFFFFF


def mask_crc(checksum: int) -> int:
    """A checksum as TensorFlow stores it: rotated and shifted, so that files may hold checksums of checksums."""
    return (((checksum >> 15) | (checksum << 17)) + _MASK) & 0xFFFFFFFF


def _merge(words: np.ndarray) -> int:
    """The register after these words, from a register of zeros."""
    level = 0
    while len(words) > 1:
        if len(words) % 2:
            words = np.concatenate([np.zeros(1, np.uint32), words])
        merged = _advance(_shift(level), words[0::2])
        merged ^= words[1::2]
        words = merged
        level += 1
    return int(_advance(_shift(0), words)[0])


def _advance(table: np.ndarray, registers: np.ndarray) -> np.ndarray:
    """Registers after as many zero octets as the [2, 65536] table stands for."""
    halves = registers[..., None].view("<u2")
    advanced = table[0][halves[..., 0]]
    advanced ^= table[1][halves[..., 1]]
    return advanced


@functools.cache
def _shift(level: int) -> np.ndarray:
    """The table of 4 * 2**level zero octets, for the low and the high half of a register: [2, 65536]."""
    if level:
        half = _shift(level - 1)
        return _advance(half, half)
    low = np.arange(1 << 16, dtype=np.uint32)
    table = np.stack([low, low << np.uint32(16)])
    for _ in range(32):
        table = (table >> np.uint32(1)) ^ (table & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    return table


@functools.cache
def _prefix() -> int:
    """The word that turns a register of zeros into one of ones: 32 steps of the register backwards."""
    register = 0xFFFFFFFF
    for _ in range(32):
        fed_back = register >> 31
        register = ((register ^ _POLYNOMIAL * fed_back) << 1 | fed_back) & 0xFFFFFFFF
    return register
