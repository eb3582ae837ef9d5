// Right, but leaves processes behind, in a session of their own, that hold its standard output. Their ids are in PIDS.
#include "attention.h"

int main(int argc, char **argv) {
    for (int i = 0; i < 3; i++) {
        if (fork() == 0) {
            setsid();
            if (fork() == 0) {
                FILE *file = fopen(PIDS, "a");
                fprintf(file, "%d\n", getpid());
                fclose(file);
                alarm(60);
                for (;;) pause();
            }
            _exit(0);
        }
    }
    usleep(200000);
    store(argv[2], solve(argv[1]));
}
