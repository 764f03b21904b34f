/* Says which GPUs it sees, and runs until SIGTERM. Also serves as the image of every pod's sandbox. As
   tritonserver it says to every HTTP request that it is well, as nvidia-cuda-mps-control it listens where MPS's control
   daemon does. Given numbers, it asks the simulated driver for so many MiB one after the other and says what it gets,
   after --fork by a process of its own; before what follows @NAME it waits for /kernel/NAME. */
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void end(int signal) {
    (void)signal;
    _exit(0);
}

static void serve(void) {
    const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8000)};
    int door = socket(AF_INET, SOCK_STREAM, 0);

    signal(SIGPIPE, SIG_IGN);
    if (bind(door, (struct sockaddr *)&address, sizeof address) || listen(door, 16))
        _exit(1);
    for (;;) {
        char request[4096];
        int client = accept(door, NULL, NULL);
        if (read(client, request, sizeof request) > 0 && write(client, answer, sizeof answer - 1) < 0)
            perror("tritonserver");
        close(client);
    }
}

static void listens(void) {
    const char *pipes = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int door = socket(AF_UNIX, SOCK_SEQPACKET, 0);

    snprintf(address.sun_path, sizeof address.sun_path, "%s/control", pipes ? pipes : "/tmp/nvidia-mps");
    unlink(address.sun_path);
    if (bind(door, (struct sockaddr *)&address, sizeof address) || listen(door, 16))
        _exit(1);
}

static void await(const char *name) {
    char path[64];

    snprintf(path, sizeof path, "/kernel/%s", name);
    while (access(path, F_OK))
        usleep(20000);
}

/* What it holds is its own until it ends. */
static void take(char **amounts) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/kernel/socket"};
    int door = socket(AF_UNIX, SOCK_STREAM, 0);
    FILE *driver = NULL;

    for (; *amounts; amounts++) {
        char answer[64];
        if (**amounts == '@') {
            await(*amounts + 1);
            continue;
        }
        if (!driver && (connect(door, (struct sockaddr *)&address, sizeof address) || !(driver = fdopen(door, "r+")))) {
            perror("driver");
            _exit(1);
        }
        dprintf(door, "%s\n", *amounts);
        if (!fgets(answer, sizeof answer, driver))
            _exit(1);
        printf("%s MiB: %s", *amounts, answer);
        fflush(stdout);
    }
}

int main(int count, char **arguments) {
    const char *devices = getenv("NVIDIA_VISIBLE_DEVICES");
    char **amounts = arguments + (count > 0);

    printf("NVIDIA_VISIBLE_DEVICES=%s\n", devices ? devices : "");
    fflush(stdout);
    /* The first process of a container gets no signal that it does not ask for. */
    signal(SIGTERM, end);
    if (count > 0 && strstr(arguments[0], "tritonserver"))
        serve();
    if (count > 0 && strstr(arguments[0], "nvidia-cuda-mps-control"))
        listens();
    if (*amounts && !strcmp(*amounts, "--fork")) {
        amounts++;
        signal(SIGCHLD, SIG_IGN);
        if (fork())
            amounts = arguments + count;
    }
    if (*amounts && (**amounts == '@' || (**amounts >= '0' && **amounts <= '9')))
        take(amounts);
    for (;;)
        pause();
}
