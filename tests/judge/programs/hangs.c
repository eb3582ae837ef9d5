// Waits for ever, and does not listen to SIGTERM.
#include <signal.h>

#include "attention.h"

int main(int argc, char **argv) {
    signal(SIGTERM, SIG_IGN);
    for (;;) pause();
}
