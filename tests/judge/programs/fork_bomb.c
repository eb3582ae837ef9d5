// Every process starts others, in sessions of their own. Bounded, so that a judge that fails cannot hurt the machine.
#include <fcntl.h>
#include <sys/mman.h>

#include "attention.h"

int main(int argc, char **argv) {
    int *left = mmap(0, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *left = 200;
    alarm(20);
    while (__atomic_fetch_sub(left, 1, __ATOMIC_SEQ_CST) > 0) {
        if (fork() == 0) {
            setsid();
            alarm(20);
        }
    }
    for (;;) pause();
}
