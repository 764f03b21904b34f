/* Says which GPUs it sees, and runs until SIGTERM. Also serves as the image of every pod's sandbox. As
   tritonserver it says to every HTTP request that it is well. */
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

int main(int count, char **arguments) {
    const char *devices = getenv("NVIDIA_VISIBLE_DEVICES");

    printf("NVIDIA_VISIBLE_DEVICES=%s\n", devices ? devices : "");
    fflush(stdout);
    /* The first process of a container gets no signal that it does not ask for. */
    signal(SIGTERM, end);
    if (count > 0 && strstr(arguments[0], "tritonserver"))
        serve();
    for (;;)
        pause();
}
