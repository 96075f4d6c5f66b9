// Runs kernels for AArch64 that another process has: a call's memory is that process's, fetched a page at a time when
// the kernel first touches it, and given back where it changed.
//
// Asked on the standard input: 'L' and a path of 256 bytes loads a library, and answers with the address of the symbol
// of 256 bytes that follows; 'C' and four 64-bit words calls the kernel at the first of them with the others.  Answers
// are 64-bit words: DONE and a value; WANTED and an address, upon which come 4096 bytes; CHANGED, an address and 4096.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, MOST = 1 << 20 };
enum { DONE, WANTED, CHANGED };
typedef int64_t Kernel(int64_t, int64_t, int64_t);
static char *pages[MOST];
static int many;

static void end(const char *why) {
    if (write(2, why, strlen(why)) < 0) _exit(3);
    _exit(2);
}
static void get(void *to, size_t bytes) {
    for (ssize_t n; bytes; to = (char *)to + n, bytes -= n)
        if ((n = read(0, to, bytes)) <= 0) _exit(0);
}
static void put(const void *from, size_t bytes) {
    for (ssize_t n; bytes; from = (const char *)from + n, bytes -= n)
        if ((n = write(1, from, bytes)) <= 0) _exit(0);
}
static void answer(int64_t kind, int64_t value) {
    const int64_t words[2] = {kind, value};
    put(words, sizeof words);
}
static void fetch(int signal, siginfo_t *about, void *unused) {
    char *page = (char *)((uintptr_t)about->si_addr & -PAGE);
    for (int i = 0; i < many; i++)
        if (pages[i] == page) end("a kernel failed in memory that it has\n");
    if (many == MOST) end("a kernel touches more than 4 GiB\n");
    if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != page)
        end("the emulator has memory of its own where the kernel's is; run it again\n");
    pages[many++] = page;
    answer(WANTED, (int64_t)page);
    get(page, PAGE);
}
int main() {
    static char stack[1 << 16], path[256], symbol[256];
    const stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    const struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (sigaltstack(&other, NULL) || sigaction(SIGSEGV, &action, NULL)) end("no handler\n");
    for (char what;;) {
        get(&what, 1);
        if (what == 'L') {
            get(path, sizeof path), get(symbol, sizeof symbol);
            void *library = dlopen(path, RTLD_NOW);
            if (!library) end(dlerror());
            answer(DONE, (int64_t)dlsym(library, symbol));
            continue;
        }
        int64_t words[4];
        get(words, sizeof words);
        const int64_t status = ((Kernel *)words[0])(words[1], words[2], words[3]);
        for (; many; munmap(pages[many], PAGE)) {
            answer(CHANGED, (int64_t)pages[--many]);
            put(pages[many], PAGE);
        }
        answer(DONE, status);
    }
}
