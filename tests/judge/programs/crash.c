// Writes to address 0.
#include "attention.h"

int main(int argc, char **argv) {
    puts("so far, so good");
    fflush(stdout);
    *(volatile int *)0 = 1;
}
