{{- define "outrider.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Pools by role, of the values; of the demo where they name none. */}}
{{- define "outrider.pools" -}}
{{- $given := dict "target" (.Values.targets | default dict) "draft" (.Values.drafts | default dict) -}}
{{- if not (or $given.target $given.draft) }}{{ $given = .Files.Get "demo.yaml" | fromYaml }}{{ end -}}
{{- toJson $given -}}
{{- end -}}

{{/* Whether there are targets: "true", or empty. Without them there is nothing that a gateway could ask. */}}
{{- define "outrider.hasTargets" -}}
{{- if (include "outrider.pools" . | fromJson).target }}true{{ end -}}
{{- end -}}

{{/* Of one workload. Takes a dict: root, role, pool (may be empty). */}}
{{- define "outrider.workload" -}}
{{- $name := printf "%s-%s" (include "outrider.name" .root) .role -}}
{{- if .pool }}{{ $name = printf "%s-%s" $name .pool }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- if .pool }}
outrider/pool: {{ .pool | quote }}
{{- end }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "outrider.image" -}}
{{- $image := .root.Values.image -}}
{{- $registry := required "image.registry: the registry that you have pushed the images to" $image.registry -}}
{{- $digest := index $image.digests .role | default "" -}}
{{- if $digest -}}
{{ printf "%s/outrider-%s@%s" $registry .role $digest }}
{{- else -}}
{{ printf "%s/outrider-%s:%s" $registry .role ($image.tag | default .root.Chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{/* What pods of every role have, so that PodSecurity "restricted" admits them. */}}
{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
{{- range $name, $value := .root.Values.podSecurityContext }}
{{- if not (kindIs "invalid" $value) }}
{{ $name }}: {{ toJson $value }}
{{- end }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Of a pod's spec. Takes a dict: root, role, pool, placement (a pool's or a part's values). */}}
{{- define "outrider.placement" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "outrider.podSecurity" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .placement.priorityClassName | default .root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .placement.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .placement.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- with .placement.initContainers }}
initContainers: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $spread := list }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
{{- $spread = append $spread (dict "maxSkew" 1 "topologyKey" . "whenUnsatisfiable" "ScheduleAnyway") }}
{{- end }}
{{- if hasKey .placement "topologySpreadConstraints" }}{{ $spread = .placement.topologySpreadConstraints }}{{ end }}
{{- with $spread }}
topologySpreadConstraints:
{{- range . }}
  - {{- merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" (include "outrider.selector" $ | fromYaml))) | toYaml | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The chart's own labels stand before the operator's: selectors ask for them. */}}
{{- define "outrider.podMetadata" -}}
{{- $labels := include "outrider.labels" . | fromYaml }}
{{- with .node }}{{ $_ := set $labels "outrider/ray-node" . }}{{ end }}
{{- $labels = merge $labels (.placement.podLabels | default dict) .root.Values.podLabels }}
labels: {{- toYaml $labels | nindent 2 }}
{{- with merge dict (.placement.podAnnotations | default dict) .root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* POD_IP stands before the user's own, which may refer to it. OUTRIDER_METADATA is --metadata: a password in it is on no command line. */}}
{{- define "outrider.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /tmp
- name: OUTRIDER_CACHE
  value: /var/cache/outrider
- name: OUTRIDER_METADATA
{{- if .root.Values.redis.urlSecret }}
  valueFrom: {secretKeyRef: {name: {{ .root.Values.redis.urlSecret | quote }}, key: url}}
{{- else if .root.Values.redis.enabled }}
  value: redis://{{ include "outrider.workload" (dict "root" .root "role" "redis") }}:6379
{{- else }}
  value: {{ .root.Values.redis.url | quote }}
{{- end }}
{{- if has .role (list "target" "draft") }}
# The hub's client keeps files of its own, for which /tmp is small.
- name: HF_HOME
  value: /var/cache/outrider/hub
{{- with .root.Values.models.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
{{- end }}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- with .placement.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The secret with a role's certificate, or with that of the gateway's public ports: named, or made by cert-manager; empty: none. Takes a dict: root, role. */}}
{{- define "outrider.tlsSecret" -}}
{{- $made := and .root.Values.certManager.enabled (or (ne .role "public") (gt (len .root.Values.certManager.publicNames) 0)) -}}
{{- $ours := ternary (printf "%s-%s-tls" (include "outrider.name" .root) .role) "" $made -}}
{{- index .root.Values.tlsSecrets .role | default $ours -}}
{{- end -}}

{{/* Options of every process. Takes a dict: root, drain (seconds). */}}
{{- define "outrider.commonArgs" -}}
- --drain-timeout
- {{ .drain | quote }}
- --log-format
- {{ .root.Values.logFormat }}
{{- if .root.Values.clusterSecret }}
- --cluster-secret-file
- /run/secrets/cluster/secret
{{- end }}
{{- end -}}

{{/* Of a workload: one pod of it at a time, or minAvailable stay. */}}
{{- define "outrider.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "outrider.workload" . }}
  labels: {{- include "outrider.labels" . | nindent 4 }}
spec:
  {{- if hasKey . "minAvailable" }}
  minAvailable: {{ .minAvailable }}
  {{- else }}
  maxUnavailable: 1
  {{- end }}
  selector:
    matchLabels: {{- include "outrider.selector" . | nindent 6 }}
{{- end -}}

{{/* Of a port for other pods: with certificates, or in plain text by name. */}}
{{- define "outrider.tlsArgs" -}}
{{- if include "outrider.tlsSecret" . -}}
- --tls-dir
- /run/secrets/tls
{{- else -}}
- --insecure
{{- end -}}
{{- end -}}

{{/* The secrets of a pod's volumes, by the directory below /run/secrets at which they lie. */}}
{{- define "outrider.secrets" -}}
{{- $all := .root.Values -}}
{{- $found := dict -}}
{{- if and $all.clusterSecret (has .role (list "gateway" "controller" "target" "draft")) }}{{ $_ := set $found "cluster" (dict "secretName" $all.clusterSecret) }}{{ end -}}
{{- if eq .role "controller" -}}
{{- $_ := set $found "salt" (dict "secretName" (include "outrider.drawnSecret" (dict "context" . "given" $all.controller.cacheSaltSecret "suffix" "salt"))) -}}
{{- end -}}
{{- $secrets := .root.Values.tlsSecrets -}}
{{- $cluster := list $secrets.gateway $secrets.controller $secrets.target $secrets.draft -}}
{{- if and (without $cluster "") (has "" $cluster) -}}
{{- fail "tlsSecrets: gateway, controller, target and draft are needed together" -}}
{{- end -}}
{{- with include "outrider.tlsSecret" . }}{{ $_ := set $found "tls" (dict "secretName" .) }}{{ end -}}
{{- if eq .role "gateway" -}}
{{- with include "outrider.tlsSecret" (dict "root" .root "role" "public") }}{{ $_ := set $found "public-tls" (dict "secretName" .) }}{{ end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "outrider.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/outrider}
- {name: shm, mountPath: /dev/shm}
{{- range $folder, $secret := include "outrider.secrets" . | fromJson }}
- {name: {{ $folder }}, mountPath: /run/secrets/{{ $folder }}, readOnly: true}
{{- end }}
{{- if and .root.Values.models.existingClaim (has .role (list "target" "draft")) }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- with .placement.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .placement.shmSize | default "512Mi" | quote }}}
- name: cache
{{- $claim := .root.Values.cache.existingClaim | default (ternary (printf "%s-cache" (include "outrider.name" .root)) "" .root.Values.cache.claim.enabled) }}
{{- /* Gateways keep tokenizers there, which they fetch from targets in a moment. */}}
{{- if and $claim (has .role (list "target" "draft")) }}
  persistentVolumeClaim: {claimName: {{ $claim | quote }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .root.Values.cache.sizeLimit | quote }}}
{{- end }}
{{- range $folder, $secret := include "outrider.secrets" . | fromJson }}
- name: {{ $folder }}
  secret: {{- merge (dict "defaultMode" 0440) $secret | toYaml | nindent 4 }}
{{- end }}
{{- if and .root.Values.models.existingClaim (has .role (list "target" "draft")) }}
- name: models
  persistentVolumeClaim: {claimName: {{ .root.Values.models.existingClaim | quote }}, readOnly: true}
{{- end }}
{{- with .placement.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* On an ops port. A start may take as long as a model needs to load; a drain makes a pod unready, and not dead. Takes a dict: port, startPeriods, started (the path that answers when the process has started), alwaysReady. */}}
{{- define "outrider.probes" -}}
startupProbe:
  httpGet: {path: {{ .started | default "/readyz" }}, port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: {{ .startPeriods }}
livenessProbe:
  httpGet: {path: /livez, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- if not .alwaysReady }}
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}
{{- end -}}

{{/* Seconds that a rollout may wait for one pod: of a worker, its longest start. Takes a pool's values. */}}
{{- define "outrider.progressDeadline" -}}
{{- add (mul 5 (.startPeriods | default 240)) 120 -}}
{{- end -}}

{{/* Whether routers and control planes are on a Ray cluster, where they move between pods and Prometheus reaches none: "true", or empty. */}}
{{- define "outrider.onRayCluster" -}}
{{- if has .Values.controller.mode (list "ray-cluster" "kuberay") }}true{{ end -}}
{{- end -}}

{{/* What only routers and control planes tell (docs/metrics.md), as a query of Prometheus names it. */}}
{{- define "outrider.ofControllers" -}}
{{- toJson (list
  "outrider_admission_queue_length" "outrider_admission_queue_seconds" "outrider_admission_rejected_total"
  "outrider_alert_active" "outrider_attached_tokens_total" "outrider_draft_pool_utilization" "outrider_draft_workers_wanted" "outrider_failover_total"
  "outrider_fallback_total" "outrider_late_replies_total" "outrider_low_acceptance_total"
  "outrider_round_duration_seconds" "outrider_router_requests_running" "outrider_routers_wanted"
  "outrider_speculation_acceptance" "outrider_speculation_enabled" "outrider_speculation_price"
  "outrider_speculation_saving" "component=\"router\"" "component=\"control\""
) -}}
{{- end -}}

{{/* Refuses what a HorizontalPodAutoscaler could not have. Takes a dict: where, values. */}}
{{- define "outrider.checkBounds" -}}
{{- if gt (.values.minReplicas | int) (.values.maxReplicas | int) }}
{{- fail (printf "%s: minReplicas is above maxReplicas" .where) }}
{{- end }}
{{- end -}}

{{/* Refuses to scale by what Prometheus never has. Takes a dict: root, where, query. */}}
{{- define "outrider.checkScrapedQuery" -}}
{{- if include "outrider.onRayCluster" .root }}
{{- $context := . }}
{{- range include "outrider.ofControllers" . | fromJsonArray }}
{{- if contains . $context.query }}
{{- fail (printf "%s: %s is of routers or control planes, which Prometheus does not reach with controller.mode %s: scale by metrics of targets or drafts, or use another mode" $context.where . $context.root.Values.controller.mode) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Control plane and routers, each a container that the kubelet starts again: no Ray. */}}
{{- define "outrider.plainController" -}}
{{- $context := . }}
{{- $values := .placement }}
{{- include "outrider.plainProcess" (dict "context" . "name" "control" "module" "control" "port" 9003 "portName" "control" "opsPort" 9009 "opsName" "ops") }}
  {{- include "outrider.probes" (dict "port" "ops" "startPeriods" 60) | nindent 2 }}
{{- range $number := until ($values.routers | int) }}
{{ include "outrider.plainProcess" (dict "context" $context "name" (printf "router-%d" $number) "module" "router" "port" (add 9100 $number) "portName" (printf "router-%d" $number) "opsPort" (add 9200 $number) "opsName" (printf "router-ops-%d" $number)) }}
  # Gateways find routers by their leases: a router without targets is no reason to take the control plane out of its service.
  {{- include "outrider.probes" (dict "port" (printf "router-ops-%d" $number) "started" "/livez" "startPeriods" 60 "alwaysReady" true) | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "outrider.plainProcess" -}}
{{- $root := .context.root }}
- name: {{ .name }}
  image: {{ include "outrider.image" .context | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [python, -m, outrider_controller.{{ .module }}]
  args:
    {{- include "outrider.tlsArgs" .context | nindent 4 }}
    - --listen
    - 0.0.0.0:{{ .port }}
    - --advertise
    - $(POD_IP):{{ .port }}
    - --ops-listen
    - 0.0.0.0:{{ .opsPort }}
    {{- include "outrider.commonArgs" (dict "root" $root "drain" .context.placement.drainTimeoutSeconds) | nindent 4 }}
    {{- if eq .module "router" }}
    - --cache-salt-key-file
    - /run/secrets/salt/salt
    {{- with .context.placement.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
  env:
    {{- include "outrider.env" .context | nindent 4 }}
  ports:
    - {name: {{ .portName }}, containerPort: {{ .port }}}
    - {name: {{ .opsName }}, containerPort: {{ .opsPort }}}
  securityContext: {{- include "outrider.containerSecurity" $root | nindent 4 }}
  resources: {{- toYaml .context.placement.resources | nindent 4 }}
  volumeMounts: {{- include "outrider.mounts" .context | nindent 4 }}
{{- end -}}

{{/* The name of a secret that the operator gave, or of one that the chart draws. Takes a dict: context, given, suffix. */}}
{{- define "outrider.drawnSecret" -}}
{{ .given | default (printf "%s-%s" (include "outrider.workload" .context) .suffix) }}
{{- end -}}

{{/* What starts Ray's actors: on a Ray of its own, or on the cluster whose head is in this pod. */}}
{{- define "outrider.controllerContainer" -}}
{{- $root := .root }}
{{- $values := .placement }}
- name: controller
  image: {{ include "outrider.image" . | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [python, -m, outrider_controller]
  args:
    {{- include "outrider.tlsArgs" . | nindent 4 }}
    - --control-listen
    - 0.0.0.0:9003
    - --control-ops-listen
    - 0.0.0.0:9009
    {{- if eq $values.mode "ray" }}
    - --control-advertise
    - $(POD_IP):9003
    {{- range $number := until ($values.routers | int) }}
    - --router-listen
    - 0.0.0.0:{{ add 9100 $number }}
    - --router-advertise
    - $(POD_IP):{{ add 9100 $number }}
    - --router-ops-listen
    - 0.0.0.0:{{ add 9200 $number }}
    {{- end }}
    - --ray-temp-dir
    - /tmp/ray
    {{- else }}
    - --control-advertise
    - auto
    - --routers
    - {{ $values.routers | quote }}
    - --ray-address
    - $(POD_IP):6379
    {{- end }}
    {{- include "outrider.commonArgs" (dict "root" $root "drain" $values.drainTimeoutSeconds) | nindent 4 }}
    - --cache-salt-key-file
    - /run/secrets/salt/salt
    {{- with $values.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    {{- include "outrider.env" . | nindent 4 }}
    {{- if ne $values.mode "ray" }}
    {{- include "outrider.rayEnv" . | nindent 4 }}
    {{- end }}
  securityContext: {{- include "outrider.containerSecurity" $root | nindent 4 }}
  volumeMounts: {{- include "outrider.mounts" . | nindent 4 }}
  {{- if eq $values.mode "ray" }}
  ports:
    - {name: control, containerPort: 9003}
    - {name: ops, containerPort: 9009}
    {{- range $number := until ($values.routers | int) }}
    - {name: "router-{{ $number }}", containerPort: {{ add 9100 $number }}}
    - {name: "router-ops-{{ $number }}", containerPort: {{ add 9200 $number }}}
    {{- end }}
  # Of the control plane. Ray starts a router again that dies, and the pod ends with its Ray.
  {{- include "outrider.probes" (dict "port" "ops" "startPeriods" 60) | nindent 2 }}
  resources: {{- toYaml $values.resources | nindent 4 }}
  {{- else }}
  # What it started runs elsewhere.
  resources: {requests: {cpu: 100m, memory: 512Mi}, limits: {memory: 1Gi}}
  {{- end }}
{{- end -}}

{{/* Whoever has this token may use the Ray cluster, which holds the actors' configuration. */}}
{{- define "outrider.rayEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "outrider.drawnSecret" (dict "context" . "given" .root.Values.controller.ray.tokenSecret "suffix" "ray-token") | quote }}, key: token}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# Ray would have the kernel end routers and control planes before all else in the pod.
- name: RAY_worker_oom_score_adjustment
  value: "0"
{{- end -}}

{{/* Flags of `ray start`, as KubeRay takes them. All ports are fixed and below those that routers get from the system. Actors run on workers only. */}}
{{- define "outrider.rayStartParams" -}}
object-store-memory: "80000000"
node-manager-port: "6380"
object-manager-port: "6381"
runtime-env-agent-port: "6382"
dashboard-agent-grpc-port: "6383"
dashboard-agent-listen-port: "6384"
metrics-export-port: "6385"
min-worker-port: "10002"
max-worker-port: "10999"
{{- if eq .node "head" }}
port: "6379"
ray-client-server-port: "10001"
include-dashboard: "false"
num-cpus: "0"
{{- else }}
num-cpus: "1"
{{- end }}
{{- end -}}

{{/* A pod of the Ray cluster. Takes the context of a role, with node: head or worker. With mode kuberay its operator gives the command. */}}
{{- define "outrider.rayPod" -}}
{{- $root := .root }}
{{- $values := .placement }}
metadata: {{- include "outrider.podMetadata" . | nindent 2 }}
spec:
  {{- include "outrider.placement" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ add $values.drainTimeoutSeconds $root.Values.terminationMarginSeconds }}
  {{- if eq .node "head" }}
  # The controller joins the node whose processes it sees.
  shareProcessNamespace: true
  {{- end }}
  containers:
    - name: ray
      image: {{ include "outrider.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if eq $values.mode "ray-cluster" }}
      command: [ray, start]
      args:
        {{- if eq .node "head" }}
        - --head
        {{- else }}
        - --address={{ include "outrider.workload" . }}-head:6379
        {{- end }}
        {{- range $flag, $value := include "outrider.rayStartParams" . | fromYaml }}
        - --{{ $flag }}={{ $value }}
        {{- end }}
        - --disable-usage-stats
        - --block
      {{- end }}
      env:
        {{- include "outrider.env" . | nindent 8 }}
        {{- include "outrider.rayEnv" . | nindent 8 }}
      ports:
        {{- if eq .node "head" }}
        - {name: gcs-server, containerPort: 6379}
        {{- else }}
        # Control planes are on one or two of these pods: gRPC clients of the service go on to the next address where none is.
        # Their ops port 9009 has no name, for Prometheus would see it down for ever on all other pods.
        - {name: control, containerPort: 9003}
        {{- end }}
        - {name: raylet, containerPort: 6380}
        - {name: metrics, containerPort: 6385}
      startupProbe:
        tcpSocket: {port: raylet}
        periodSeconds: 5
        failureThreshold: 60
      livenessProbe:
        tcpSocket: {port: {{ ternary "gcs-server" "raylet" (eq .node "head") }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        tcpSocket: {port: {{ ternary "gcs-server" "raylet" (eq .node "head") }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- if eq .node "head" }}
      # Ray outlives the controller beside it, which drains its actors.
      lifecycle:
        preStop: {exec: {command: [sleep, {{ $values.drainTimeoutSeconds | quote }}]}}
      {{- end }}
      securityContext: {{- include "outrider.containerSecurity" $root | nindent 8 }}
      resources: {{- toYaml $values.resources | nindent 8 }}
      volumeMounts: {{- include "outrider.mounts" . | nindent 8 }}
    {{- if eq .node "head" }}
    {{- include "outrider.controllerContainer" . | nindent 4 }}
    {{- end }}
  volumes: {{- include "outrider.volumes" . | nindent 4 }}
{{- end -}}
