"""How codes of weights lie in memory: in rows, or shuffled so that 16 bytes of a lane are its operand of an mma."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def unpack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Bytes ``[n, k/2]`` to their two codes, the low one first: ``[n, k]``."""
    return torch.stack((codes & 15, codes >> 4), -1).view(codes.shape[0], -1)


def pack_rows(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`unpack_rows`."""
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def words_to_bytes(words: torch.Tensor) -> torch.Tensor:
    """32-bit words, each in an int64, to their bytes, uint8, the lowest first."""
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return signed.contiguous().view(torch.uint8)


def bytes_to_words(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`words_to_bytes`, in one dimension."""
    return codes.contiguous().view(-1).view(torch.int32).long() & 0xFFFFFFFF


def to_fragments(rows: torch.Tensor) -> torch.Tensor:
    """Elements ``[16 tiles, k]`` in the order of m16n8k16's A operand: ``[tiles, k/64, lane, step, register, half]``.

    K is permuted so that lane 4g + t owns the 16 columns from 16t of every 64, of rows g and g + 8.
    """
    k = rows.shape[1]
    return rows.view(-1, 2, 8, k // 64, 4, 4, 2, 2).permute(0, 3, 2, 4, 5, 6, 1, 7).contiguous().view(-1, 4, 2)


def from_fragments(fragments: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of :func:`to_fragments`."""
    return fragments.reshape(-1, k // 64, 8, 4, 4, 2, 2, 2).permute(0, 6, 2, 1, 3, 4, 5, 7).reshape(-1, k)


def _byte_fragments(rows: torch.Tensor) -> torch.Tensor:
    """Elements ``[16 tiles, k]`` in the order of wgmma's A operand of 8-bit numbers: ``[tiles, k/64, lane, step, 16
    columns, register, byte]``. Of every 16 columns lane 4g + t owns the four from 4t, of rows g and g + 8."""
    k = rows.shape[1]
    return rows.view(-1, 2, 8, k // 64, 2, 2, 4, 4).permute(0, 3, 2, 6, 4, 5, 1, 7).contiguous().view(-1, 2, 4)


def _from_byte_fragments(fragments: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of :func:`_byte_fragments`."""
    return fragments.reshape(-1, k // 64, 8, 4, 2, 2, 2, 4).permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(-1, k)


@dataclass(frozen=True)
class WordLayout:
    """How 8 codes, ``[..., registers, codes of a register]``, lie in a 32-bit word (here in an int64), and which they
    are."""

    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]
    order: Callable[[torch.Tensor], torch.Tensor] = to_fragments
    restore: Callable[[torch.Tensor, int], torch.Tensor] = from_fragments


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Register r's two codes are the r-th nibbles from the top of the word's two halves."""
    word = torch.zeros(codes.shape[:-2], dtype=torch.int64, device=codes.device)
    for register in range(4):
        for half in range(2):
            word |= codes[..., register, half].long() << 16 * half + 12 - 4 * register
    return word


def _unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    codes = [[words >> 16 * half + 12 - 4 * register & 15 for half in range(2)] for register in range(4)]
    return torch.stack([torch.stack(pair, -1) for pair in codes], -2).to(torch.uint8)


_WORD = 0xFFFFFFFF
_BF16_BITS = 0x81C081C0  # of a pair of BF16: the sign, the two lowest bits of the exponent, the highest of the mantissa


def _unfold(word: Any) -> list[Any]:
    """The four registers of a folded word, as the kernels make them: eight operations for eight weights.

    A code's sign, exponent and mantissa stand where BF16 has them, with everything else zero: the value x 2^-126.
    Four shifts of one word cannot tile it with that pattern, so register 3 is the XOR of two of them.
    """
    rotated = (word << 12 | word >> 20) & _WORD
    return [part & _BF16_BITS for part in (word, word << 6, rotated, word >> 6 ^ word << 2)]


_E4M3_BITS = 0x9C9C9C9C  # of four E4M3: the sign, the two lowest bits of the exponent, the highest of the mantissa


def _unfold_bytes(word: Any) -> list[Any]:
    """The two registers of a word whose codes become E4M3, as the kernels make them: four operations for eight weights.

    A code's sign, exponent and mantissa stand where E4M3 has them, with everything else zero: the value x 2^-6.
    """
    return [word & _E4M3_BITS, (word >> 2 ^ word << 2) & _E4M3_BITS]


@functools.cache
def _folding(unfold: Callable[[Any], list[Any]], kept: int) -> tuple[tuple[int, int, int], ...]:
    """The inverse of ``unfold``, which keeps the bits ``kept`` of each register, over GF(2): (register, mask, left
    shift) of the terms whose XOR is the word."""
    places = [bit for bit in range(32) if kept >> bit & 1]
    rows = []  # per register bit: which bits of the word it is the XOR of, and in the high half which one it is
    for register in range(32 // len(places)):
        for place in places:
            sources = sum((unfold(1 << bit)[register] >> place & 1) << bit for bit in range(32))
            rows.append(sources | 1 << 32 + len(places) * register + places.index(place))
    for bit in range(32):
        pivot = next(i for i in range(bit, 32) if rows[i] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        rows = [row ^ rows[bit] if i != bit and row >> bit & 1 else row for i, row in enumerate(rows)]
    terms: dict[tuple[int, int], int] = {}
    for bit in range(32):
        for source in (i for i in range(32) if rows[bit] >> 32 + i & 1):
            register, place = source // len(places), places[source % len(places)]
            terms[register, bit - place] = terms.get((register, bit - place), 0) | 1 << place
    return tuple((register, mask, shift) for (register, shift), mask in terms.items())


def _pack_folded(codes: torch.Tensor) -> torch.Tensor:
    """The words that :func:`_unfold` turns into the registers of the codes."""
    sign_and_rest = codes.long()
    bits = (sign_and_rest >> 3) << 15 | (sign_and_rest & 7) << 6
    return _fold(bits[..., 0] | bits[..., 1] << 16, _folding(_unfold, _BF16_BITS))


def _pack_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The words that :func:`_unfold_bytes` turns into the registers of the codes."""
    bits = (codes.long() >> 3) << 7 | (codes.long() & 7) << 2
    registers = bits[..., 0] | bits[..., 1] << 8 | bits[..., 2] << 16 | bits[..., 3] << 24
    return _fold(registers, _folding(_unfold_bytes, _E4M3_BITS))


def _fold(registers: torch.Tensor, folding: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    word = torch.zeros(registers.shape[:-1], dtype=torch.int64, device=registers.device)
    for register, mask, shift in folding:
        term = registers[..., register] & mask
        word ^= term << shift if shift >= 0 else term >> -shift
    return word


def _unpack_folded(words: torch.Tensor) -> torch.Tensor:
    registers = torch.stack(_unfold(words), -1)
    halves = torch.stack((registers & 0xFFFF, registers >> 16), -1)
    return (halves >> 12 & 8 | halves >> 6 & 7).to(torch.uint8)


def _unpack_bytes(words: torch.Tensor) -> torch.Tensor:
    registers = torch.stack(_unfold_bytes(words), -1)
    values = torch.stack([registers >> 8 * byte & 0xFF for byte in range(4)], -1)
    return (values >> 4 & 8 | values >> 2 & 7).to(torch.uint8)


FP4_LAYOUTS: dict[str, WordLayout] = {
    "fragments": WordLayout(_pack_nibbles, _unpack_nibbles),
    "folded": WordLayout(_pack_folded, _unpack_folded),
    "bytes": WordLayout(_pack_bytes, _unpack_bytes, _byte_fragments, _from_byte_fragments),
}
LAYOUT_CODES = {"rows": 0, "fragments": 1, "folded": 2, "bytes": 3}
