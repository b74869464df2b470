"""The assembler (PTX) that turns bytes of two 4-bit weights into half-precision numbers."""

import torch

from medusa_chat.decoding.backends.nf4_tiles import TABLE


def decoder(dtype: torch.dtype) -> str:
    """For `inline_asm_elementwise` with pack 4: four bytes in $4 -> the numbers of their low
    halves in $0 and $1, of their high halves in $2 and $3. dtype: fp16 or bf16.

    `prmt` picks each byte of its result out of eight by three bits of a 4-bit number, so two of
    them and one that chooses by the fourth bit look up a byte of four weights: 21 instructions for
    eight weights, and no memory is read.
    """
    bits = torch.tensor(TABLE).to(dtype).view(torch.int16).tolist()
    lines = [
        "and.b32 s, $4, 0x77777777",  # which of eight
        "shr.u32 m, $4, 1",
        "and.b32 m, m, 0x44444444",
        "or.b32 m, m, 0x32103210",  # from the lower or the upper eight
    ]
    for low, high in (("$0", "$2"), ("$1", "$3")):
        for name, shift in (("l", 0), ("h", 8)):
            words = _words([(value >> shift) & 0xFF for value in bits])
            lines += [
                f"prmt.b32 a, {words[0]}, {words[1]}, s",
                f"prmt.b32 b, {words[2]}, {words[3]}, s",
                f"prmt.b32 {name}, a, b, m",
            ]
        lines += [f"prmt.b32 {low}, l, h, 0x6240", f"prmt.b32 {high}, l, h, 0x7351"]
        if low == "$0":
            lines += ["shr.u32 s, s, 16", "shr.u32 m, m, 16"]
    body = "\n".join(f"{line};" for line in lines)
    return "{\n.reg .b32 s, m, a, b, l, h;\n" + body + "\n}"


def _words(values: list[int]) -> list[str]:
    """Sixteen bytes as four numbers of 32 bits, the first byte lowest."""
    return [f"0x{int.from_bytes(bytes(values[i : i + 4]), 'little'):08x}" for i in (0, 4, 8, 12)]
