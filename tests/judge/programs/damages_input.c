// Right, but empties its input afterwards, and deletes the file that a link leads to.
#include "attention.h"

int main(int argc, char **argv) {
    struct problem p = solve(argv[1]);
    char path[4096];
    if (!realpath(argv[1], path) || truncate(path, 0) || unlink(path)) return 7;
    store(argv[2], p);
}
