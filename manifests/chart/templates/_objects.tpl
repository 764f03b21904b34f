{{/* The files that are installed, a JSON list. */}}
{{- define "gpustow.files" -}}
{{- $files := list }}
{{- range $path, $_ := .Files.Glob "files/{core,agent,base}/**.yaml" }}
{{- /* Helm creates what is in crds/ before the GpustowConfig, which is a part of the release; but not in an upgrade. */}}
{{- $crd := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "gpustowconfigs.gpustow.dev" }}
{{- if or (ne $path "files/core/config-crd.yaml") (and $.Release.IsUpgrade (not $crd)) }}{{- $files = append $files (trimPrefix "files/" $path) }}{{- end }}
{{- end }}
{{- if .Values.disruptions }}{{- $files = append $files "disruptions/rbac.yaml" }}{{- end }}
{{- if dig "provision" "max" 0 .Values.config | int }}{{- $files = concat $files (list "provision/policy.yaml" "provision/rbac.yaml") }}{{- end }}
{{- if dig "claims" "fence" false .Values.config }}{{- $files = concat $files (list "claims/policy.yaml" "claims/rbac.yaml") }}{{- end }}
{{- if eq .Values.webhook.certificate "selfSigned" }}{{- $files = concat $files (list "certificate/policy.yaml" "certificate/rbac.yaml") }}{{- end }}
{{- if .Values.guard }}
{{- $files = append $files "guard/policy.yaml" }}
{{- if eq (include "gpustow.guard" .) "v1beta1" }}{{- $files = append $files "overlays/guard-v1beta1/policies.yaml" }}{{- end }}
{{- end }}
{{- if ne (include "gpustow.queue" .) "Off" }}{{- $files = concat $files (list "queue/rbac.yaml" "queue/policy.yaml") }}{{- end }}
{{- if .Values.agent.setLimits }}{{- $files = append $files "set-limits/rbac.yaml" }}{{- end }}
{{- if .Values.page.enabled }}{{- $files = concat $files (list "page/rbac.yaml" "page/page.yaml") }}{{- end }}
{{- if .Values.metrics.secure }}{{- $files = append $files "metrics-auth/rbac.yaml" }}{{- end }}
{{- if .Values.monitoring.enabled }}{{- $files = concat $files (list "monitoring/podmonitors.yaml" "monitoring/rules.yaml") }}{{- end }}
{{- toJson $files }}
{{- end }}

{{/* dict root object: sets what values say of an object. */}}
{{- define "gpustow.object" -}}
{{- $root := .root }}{{- $values := .root.Values }}{{- $object := .object }}
{{- $what := printf "%s/%s" $object.kind $object.metadata.name }}
{{- range $ours, $theirs := dict "labels" $values.commonLabels "annotations" $values.commonAnnotations }}
{{- with $theirs }}
{{- $_ := set $object.metadata $ours (mergeOverwrite (deepCopy .) (get $object.metadata $ours | default dict)) }}
{{- end }}
{{- end }}
{{- $env := list }}
{{- if ne $values.resourceName "gpustow.dev/gpu-mem" }}
{{- $env = list (dict "name" "GPUSTOW_RESOURCE_NAME" "value" $values.resourceName) }}
{{- end }}
{{- if eq $what "Deployment/gpustow-scheduler" }}
{{- $_ := set $object.spec "replicas" $values.scheduler.replicas }}
{{- $pod := $object.spec.template.spec }}
{{- include "gpustow.pod" (dict "root" $root "template" $object.spec.template "values" $values.scheduler) }}
{{- $extender := first $pod.initContainers }}
{{- $args := list }}
{{- $own := list }}
{{- range $extender.args }}{{- $own = append $own (replace ":10250" (printf ":%v" $values.webhook.port) .) }}{{- end }}
{{- $_ := set $extender "args" $own }}
{{- range $extender.ports }}{{- if eq .name "webhook" }}{{- $_ := set . "containerPort" $values.webhook.port }}{{- end }}{{- end }}
{{- if $values.webhook.hostNetwork }}
{{- $_ := set $pod "hostNetwork" true }}
{{- $_ := set $pod "dnsPolicy" "ClusterFirstWithHostNet" }}
{{- end }}
{{- if ne $values.webhook.certificate "selfSigned" }}
{{- $args = append $args "--webhook-tls=/etc/gpustow-webhook" }}
{{- $_ := set $extender "volumeMounts" (list (dict "name" "webhook-tls" "mountPath" "/etc/gpustow-webhook" "readOnly" true)) }}
{{- $_ := set $pod "volumes" (append $pod.volumes (dict "name" "webhook-tls" "secret" (dict "secretName" "gpustow-webhook-tls"))) }}
{{- end }}
{{- if $values.metrics.secure }}
{{- $args = concat $args (list "--metrics-tls=/etc/gpustow-tls" "--metrics-auth") }}
{{- include "gpustow.secure" (dict "template" $object.spec.template "container" $extender) }}
{{- end }}
{{- include "gpustow.once" (dict "value" "extender.extraArgs" "args" (concat $extender.args $args) "extra" $values.extender.extraArgs) }}
{{- $args = concat $args $values.extender.extraArgs }}
{{- include "gpustow.container" (dict "root" $root "container" $extender "image" $values.extender.image "tag" $root.Chart.AppVersion "resources" $values.extender.resources "args" $args) }}
{{- $_ := set $extender "env" (concat $extender.env $env) }}
{{- $tag := include "gpustow.schedulerTag" $root }}
{{- include "gpustow.container" (dict "root" $root "container" (first $pod.containers) "image" $values.scheduler.image "tag" $tag "resources" $values.scheduler.resources "args" $values.scheduler.extraArgs) }}
{{- $_ := set (first $pod.volumes).configMap "name" (include "gpustow.configName" $root) }}
{{- else if eq $what "DaemonSet/gpustow-agent" }}
{{- include "gpustow.pod" (dict "root" $root "template" $object.spec.template "values" $values.agent) }}
{{- $agent := first $object.spec.template.spec.containers }}
{{- $args := list }}
{{- if $values.agent.killProcesses }}
{{- $args = prepend $args "--kill-processes" }}
{{- $_ := set $agent.securityContext.capabilities "add" (list "KILL") }}
{{- end }}
{{- if $values.agent.setLimits }}
{{- $args = prepend $args "--set-limits" }}
{{- range $agent.volumeMounts }}{{- if eq .name "cgroup" }}{{- $_ := unset . "readOnly" }}{{- end }}{{- end }}
{{- end }}
{{- if $values.agent.toolkitLimits }}{{- $args = prepend $args "--toolkit-limits" }}{{- end }}
{{- with $values.agent.headroomMiB }}{{- $args = prepend $args (printf "--headroom-mib=%d" (int .)) }}{{- end }}
{{- if or $values.agent.setLimits $values.agent.makeInstances }}
{{- $_ := unset $agent.securityContext "allowPrivilegeEscalation" }}
{{- $_ := set $agent.securityContext "privileged" true }}
{{- end }}
{{- $spec := $object.spec.template.spec }}
{{- $extra := list }}
{{- if $values.agent.makeInstances }}
{{- $args = prepend $args "--make-instances" }}
{{- $extra = list (dict "name" "NVIDIA_MIG_CONFIG_DEVICES" "value" "all") (dict "name" "NVIDIA_MIG_MONITOR_DEVICES" "value" "all") }}
{{- include "gpustow.hostPath" (dict "spec" $spec "name" "cdi" "path" "/var/run/cdi") }}
{{- include "gpustow.hostPath" (dict "spec" $spec "name" "etc-cdi" "path" "/etc/cdi" "readOnly" true) }}
{{- include "gpustow.hostPath" (dict "spec" $spec "name" "instances" "path" "/run/gpustow/instances") }}
{{- end }}
{{- if and $values.agent.seeInstances (not $values.agent.makeInstances) }}
{{- $extra = list (dict "name" "NVIDIA_MIG_MONITOR_DEVICES" "value" "all") }}
{{- $capabilities := $agent.securityContext.capabilities }}
{{- $_ := set $capabilities "add" (append ($capabilities.add | default list) "SYS_ADMIN") }}
{{- $_ := unset $agent.securityContext "allowPrivilegeEscalation" }}
{{- end }}
{{- if $values.agent.mps }}
{{- $args = prepend $args "--mps" }}
{{- include "gpustow.hostPath" (dict "spec" $spec "name" "mps" "path" "/run/gpustow/mps/pipe" "readOnly" true) }}
{{- end }}
{{- if $values.agent.mpsDaemon }}
{{- if not $values.agent.mps }}{{ fail "agent.mpsDaemon needs agent.mps=true" }}{{ end }}
{{- $args = append $args "--mps-shm=/run/gpustow/mps/shm" }}
{{- include "gpustow.hostPath" (dict "spec" $spec "name" "mps-shm" "path" "/run/gpustow/mps/shm") }}
{{- $daemon := include "gpustow.mpsDaemon" $root | fromYaml }}
{{- include "gpustow.container" (dict "root" $root "container" $daemon "image" $values.agent.image "tag" $root.Chart.AppVersion) }}
{{- $_ := set $spec "containers" (append $spec.containers $daemon) }}
{{- end }}
{{- if $values.metrics.secure }}
{{- $args = concat $args (list "--metrics-tls=/etc/gpustow-tls" "--metrics-auth") }}
{{- include "gpustow.secure" (dict "template" $object.spec.template "container" $agent) }}
{{- end }}
{{- include "gpustow.once" (dict "value" "agent.extraArgs" "args" (concat $agent.args $args) "extra" $values.agent.extraArgs) }}
{{- $args = concat $args $values.agent.extraArgs }}
{{- include "gpustow.container" (dict "root" $root "container" $agent "image" $values.agent.image "tag" $root.Chart.AppVersion "resources" $values.agent.resources "args" $args) }}
{{- $_ := set $agent "env" (concat $agent.env $extra $env) }}
{{- else if eq $what "Deployment/gpustow-page" }}
{{- include "gpustow.pod" (dict "root" $root "template" $object.spec.template "values" dict) }}
{{- include "gpustow.container" (dict "root" $root "container" (first $object.spec.template.spec.containers) "image" $values.page.image "tag" $root.Chart.AppVersion) }}
{{- else if has $object.kind (list "PodMonitor" "PrometheusRule") }}
{{- with $values.monitoring.labels }}
{{- $_ := set $object.metadata "labels" (mergeOverwrite (deepCopy .) (get $object.metadata "labels" | default dict)) }}
{{- end }}
{{- range $endpoint := $object.spec.podMetricsEndpoints }}
{{- with $values.monitoring.interval }}{{- $_ := set $endpoint "interval" . }}{{- end }}
{{- if $values.metrics.secure }}
{{- $_ := set $endpoint "scheme" "https" }}
{{- $_ := set $endpoint "tlsConfig" (dict "ca" (dict "secret" (dict "name" "gpustow-metrics-tls" "key" "ca.crt")) "serverName" "gpustow-metrics.gpustow-system.svc") }}
{{- $_ := set $endpoint "authorization" (dict "credentials" (dict "name" "gpustow-metrics-reader" "key" "token")) }}
{{- end }}
{{- end }}
{{- else if eq $object.kind "CustomResourceDefinition" }}
{{- $_ := set $object.metadata "annotations" (set ($object.metadata.annotations | default dict) "helm.sh/resource-policy" "keep") }}
{{- else if eq $object.kind "MutatingWebhookConfiguration" }}
{{- if eq $values.webhook.certificate "certManager" }}
{{- $_ := set $object.metadata "annotations" (set ($object.metadata.annotations | default dict) "cert-manager.io/inject-ca-from" "gpustow-system/gpustow-webhook") }}
{{- else if .authority }}
{{- $authority := b64enc .authority }}
{{- range $object.webhooks }}{{- $_ := set .clientConfig "caBundle" $authority }}{{- end }}
{{- end }}
{{- end }}
{{- toYaml $object }}
{{- end }}

{{/* dict template container: serves its metrics and health over TLS, as manifests/metrics-auth has it. */}}
{{- define "gpustow.secure" -}}
{{- range $probe := list "startupProbe" "readinessProbe" "livenessProbe" }}
{{- with get $.container $probe }}{{- $_ := set .httpGet "scheme" "HTTPS" }}{{- end }}
{{- end }}
{{- $mount := dict "name" "tls" "mountPath" "/etc/gpustow-tls" "readOnly" true }}
{{- $_ := set .container "volumeMounts" (append (.container.volumeMounts | default list) $mount) }}
{{- $_ := set .template.spec "volumes" (append .template.spec.volumes (dict "name" "tls" "secret" (dict "secretName" "gpustow-metrics-tls"))) }}
{{- $_ := set .template.metadata.annotations "prometheus.io/scheme" "https" }}
{{- end }}

{{/* dict spec name path readOnly: mounts a directory of the node into the first container. */}}
{{- define "gpustow.hostPath" -}}
{{- $mount := dict "name" .name "mountPath" .path }}
{{- if .readOnly }}{{- $_ := set $mount "readOnly" true }}{{- end }}
{{- $container := first .spec.containers }}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts $mount) }}
{{- $_ := set .spec "volumes" (append .spec.volumes (dict "name" .name "hostPath" (dict "path" .path "type" "DirectoryOrCreate"))) }}
{{- end }}

{{/* MPS's control daemon beside the agent, as manifests/mps-daemon has it. */}}
{{- define "gpustow.mpsDaemon" -}}
name: mps
command: [nvidia-cuda-mps-control, -f, --multiuser-server]
env:
  - {name: CUDA_MPS_PIPE_DIRECTORY, value: /run/gpustow/mps/pipe}
  - {name: CUDA_MPS_LOG_DIRECTORY, value: /tmp}
  - {name: NVIDIA_VISIBLE_DEVICES, value: all}
  - {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
resources:
  requests: {cpu: 20m, memory: 64Mi}
securityContext: {runAsUser: 0, privileged: true}
volumeMounts:
  - {name: mps, mountPath: /run/gpustow/mps/pipe}
  - {name: mps-shm, mountPath: /dev/shm}
{{- end }}
