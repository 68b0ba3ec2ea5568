"""A copy of many rows in one call, past the processor's cache: 134 bytes of x86-64 machine code.

Why machine code: a copy of short runs is bound by what happens between two runs, and nothing that
Python can call copies more than one. And the bytes of a KV block are not read soon after the copy,
yet the C library's memmove first loads every line that it is about to overwrite (it streams only
above some 200 MB): a third of the memory traffic. Together that is 1.4 to 6 times a loop of
memmove. Only instructions that every x86-64 processor has; other machines copy as `copying` says.

It is tried out before use; see `machine_code` for what else guards it.
"""

import functools
from collections.abc import Callable

from kvgrpc.datapath.copy import machine_code
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import Rows

# void copy_rows(const int64_t (*rows)[3], uint64_t count, void *(*memmove)(void *, void *, size_t))
# A row is (destination, source, bytes). Calling convention of System V. Each line: bytes, listing.
# It keeps a frame pointer, so that debuggers and profilers can walk over it.
COPY_ROWS = """
f30f1efa        endbr64
55              push rbp
4889e5          mov rbp, rsp
53              push rbx
4154            push r12
4155            push r13
4883ec08        sub rsp, 8              # calls want the stack at a multiple of 16
4889fb          mov rbx, rdi            # row
4989f4          mov r12, rsi            # rows left
4989d5          mov r13, rdx            # memmove
4d85e4          test r12, r12
7459            je done
                next:
488b3b          mov rdi, [rbx]
488b7308        mov rsi, [rbx + 8]
488b5310        mov rdx, [rbx + 16]
40f6c70f        test dil, 15            # to where a streaming store may begin, ...
753c            jne plain
f6c23f          test dl, 63             # ... whole cache lines, ...
7537            jne plain
4881fa00040000  cmp rdx, 1024           # ... and enough of them
722e            jb plain
                stream:
0f1006          movups xmm0, [rsi]
0f104e10        movups xmm1, [rsi + 16]
0f105620        movups xmm2, [rsi + 32]
0f105e30        movups xmm3, [rsi + 48]
0f2b07          movntps [rdi], xmm0     # does not load the line it overwrites
0f2b4f10        movntps [rdi + 16], xmm1
0f2b5720        movntps [rdi + 32], xmm2
0f2b5f30        movntps [rdi + 48], xmm3
4883c640        add rsi, 64
4883c740        add rdi, 64
4883ea40        sub rdx, 64
75d4            jne stream
eb03            jmp advance
                plain:
41ffd5          call r13
                advance:
4883c318        add rbx, 24
49ffcc          dec r12
75a7            jne next
                done:
0faef8          sfence                  # before anyone is told that the bytes are there
4883c408        add rsp, 8
415d            pop r13
415c            pop r12
5b              pop rbx
5d              pop rbp
c3              ret
"""


@functools.cache
def stream_copier() -> Callable[[Rows], None] | None:
    """The function that copies rows which do not overlap; None where this machine has none."""
    call = machine_code.load(machine_code.parse(COPY_ROWS)[0])
    if call is None:
        return None

    def copy(rows: Rows) -> None:
        call(rows.ctypes.data, len(rows), libc.MEMMOVE_ADDRESS)

    return copy
