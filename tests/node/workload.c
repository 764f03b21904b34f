/* Says which GPUs it sees, and runs until SIGTERM. Also serves as the image of every pod's sandbox. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    const char *devices = getenv("NVIDIA_VISIBLE_DEVICES");
    sigset_t set;
    int signal;

    printf("NVIDIA_VISIBLE_DEVICES=%s\n", devices ? devices : "");
    fflush(stdout);
    /* The first process of a container gets no signal that it does not ask for. */
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, NULL);
    sigwait(&set, &signal);
    return 0;
}
