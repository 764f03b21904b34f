{{/* The newest patch of each minor that the tests run; kube-scheduler is no newer than that. */}}
{{- define "gpustow.tested" -}}
{"1.34": 4, "1.35": 4, "1.36": 3, "1.37": 1}
{{- end }}

{{/* What stops an installation. */}}
{{- define "gpustow.check" -}}
{{- if ne .Release.Namespace "gpustow-system" }}
{{- fail "gpustow's policies name its namespace: install it with --namespace gpustow-system --create-namespace" }}
{{- end }}
{{- if and .Values.guard (eq (include "gpustow.guard" .) "none") }}
{{- fail "guard: it needs policies that change pods, of Kubernetes 1.36, or of 1.34 with the feature gate: set guard=false" }}
{{- end }}
{{- if and .Values.webhook.hostNetwork (eq (int .Values.webhook.port) 10250) }}
{{- fail "webhook.port: the kubelet has 10250 on the host's network: set another, as webhook.port=32765" }}
{{- end }}
{{- end }}

{{/* spec of the GpustowConfig, as JSON. YAML 1.1, as Helm reads it, takes a bare Off for false. */}}
{{- define "gpustow.config" -}}
{{- $config := deepCopy (.Values.config | default dict) }}
{{- range $part, $field := dict "queue" "mode" "reclaim" "action" "reserve" "after" }}
{{- $it := get $config $part | default dict }}
{{- if kindIs "bool" (get $it $field) }}{{- $_ := set $it $field "Off" }}{{- end }}
{{- end }}
{{- toJson $config }}
{{- end }}

{{/* Off, Auto or Always. */}}
{{- define "gpustow.queue" -}}
{{- dig "queue" "mode" "Off" (include "gpustow.config" . | fromJson) }}
{{- end }}

{{- define "gpustow.minor" -}}
{{ regexFind "^v?1\\.[0-9]+" .Capabilities.KubeVersion.Version | trimPrefix "v" }}
{{- end }}

{{/* Which policies that change pods the API server has, for the guard: policy, v1beta1 or none. */}}
{{- define "gpustow.guard" -}}
{{- $beta := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" }}
{{- semverCompare ">=1.36-0" .Capabilities.KubeVersion.Version | ternary "policy" ($beta | ternary "v1beta1" "none") }}
{{- end }}

{{/* The cluster's own version without a vendor's suffix, as far as it is one that was published. */}}
{{- define "gpustow.schedulerTag" -}}
{{- $tested := include "gpustow.tested" . | fromJson }}
{{- $minor := include "gpustow.minor" . }}
{{- $version := regexFind "^v?1\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version | trimPrefix "v" }}
{{- $patch := splitList "." $version | last | int }}
{{- if hasKey $tested $minor }}
{{- $patch = min $patch (get $tested $minor | int) }}
{{- end }}
{{- printf "v%s.%d" $minor $patch }}
{{- end }}

{{/* dict root image tag → the reference of an image. */}}
{{- define "gpustow.image" -}}
{{- $path := .image.repository }}
{{- with .root.Values.imageRegistry }}
{{- $path = printf "%s/%s" . (regexReplaceAll "^[^/]+/" $path "") }}
{{- end }}
{{- if .image.digest }}{{ $path }}@{{ .image.digest }}
{{- else }}{{ $path }}:{{ .image.tag | default .tag }}
{{- end }}
{{- end }}

{{/* dict value args extra: stops an installation whose program would refuse to start, as it takes no flag twice. */}}
{{- define "gpustow.once" -}}
{{- $known := list }}
{{- range .args }}{{- $known = append $known (regexFind "^--[-a-z]+" .) }}{{- end }}
{{- range .extra }}
{{- $flag := regexFind "^--[-a-z]+" . }}
{{- if and $flag (has $flag $known) }}
{{- fail (printf "%s: %s is set twice: by another value or by gpustow's manifests, and here" $.value $flag) }}
{{- end }}
{{- $known = append $known $flag }}
{{- end }}
{{- end }}

{{/* dict root container image tag resources args: sets what values say of a container. */}}
{{- define "gpustow.container" -}}
{{- $_ := set .container "image" (include "gpustow.image" .) }}
{{- with .image.pullPolicy }}{{- $_ := set $.container "imagePullPolicy" . }}{{- end }}
{{- with .resources }}{{- $_ := set $.container "resources" . }}{{- end }}
{{- $key := hasKey .container "command" | ternary "command" "args" }}
{{- with .args }}{{- $_ := set $.container $key (concat (get $.container $key) .) }}{{- end }}
{{- end }}

{{/* dict root template values: sets what values say of a pod. */}}
{{- define "gpustow.pod" -}}
{{- $spec := .template.spec }}
{{- with .root.Values.commonLabels }}
{{- $_ := set $.template.metadata "labels" (mergeOverwrite (deepCopy .) $.template.metadata.labels) }}
{{- end }}
{{- with .values.podAnnotations }}
{{- $_ := set $.template.metadata "annotations" (mergeOverwrite (deepCopy .) ($.template.metadata.annotations | default dict)) }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
{{- $secrets := list }}
{{- range . }}{{- $secrets = append $secrets (dict "name" .) }}{{- end }}
{{- $_ := set $spec "imagePullSecrets" $secrets }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $.values $key }}{{- $_ := set $spec $key . }}{{- end }}
{{- end }}
{{- end }}

{{/* kustomize's name of a generated ConfigMap: a part of the hash that it takes, which leaves the name out. */}}
{{- define "gpustow.configName" -}}
{{- $data := dict "gpustow-scheduler.yaml" (include "gpustow.schedulerConfig" .) }}
{{- $sum := dict "kind" "ConfigMap" "name" "" "data" $data | toJson | sha256sum | trunc 10 }}
{{- $sum = $sum | replace "0" "g" | replace "1" "h" | replace "3" "k" | replace "a" "m" | replace "e" "t" }}
{{- printf "gpustow-scheduler-config-%s" $sum }}
{{- end }}

{{- define "gpustow.schedulerConfig" -}}
{{- include "gpustow.file" (dict "root" . "file" "scheduler-config/gpustow-scheduler.yaml") -}}
{{- end }}

{{/* dict root file → its text, for the resource that pods ask for. */}}
{{- define "gpustow.file" -}}
{{- $text := .root.Files.Get (printf "files/%s" .file) }}
{{- if not $text }}{{ fail (printf "the chart lacks files/%s" .file) }}{{ end }}
{{- regexReplaceAll "gpustow\\.dev/gpu-mem\\b" $text .root.Values.resourceName }}
{{- end }}
