{{- define "outrider.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
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
{{- $digest := index $image.digests .role | default "" -}}
{{- if $digest -}}
{{ printf "%s/outrider-%s@%s" $image.registry .role $digest }}
{{- else -}}
{{ printf "%s/outrider-%s:%s" $image.registry .role $image.tag }}
{{- end -}}
{{- end -}}

{{/* What pods of every role have, so that PodSecurity "restricted" admits them. */}}
{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
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
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "outrider.selector" $ | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "outrider.podMetadata" -}}
labels: {{- include "outrider.labels" . | nindent 2 }}
{{- with .root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* POD_IP stands before METADATA_URL and the user's own, which may refer to it. */}}
{{- define "outrider.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /tmp
- name: OUTRIDER_CACHE
  value: /var/cache/outrider
- name: METADATA_URL
{{- if .root.Values.redis.urlSecret }}
  valueFrom: {secretKeyRef: {name: {{ .root.Values.redis.urlSecret | quote }}, key: url}}
{{- else if .root.Values.redis.enabled }}
  value: redis://{{ include "outrider.workload" (dict "root" .root "role" "redis") }}:6379
{{- else }}
  value: {{ required "redis: enabled, url or urlSecret is needed" .root.Values.redis.url | quote }}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- with .placement.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of a port for other pods: with certificates, or in plain text by name. */}}
{{- define "outrider.tlsArgs" -}}
{{- if index .root.Values.tlsSecrets .role -}}
- --tls-dir
- /run/secrets/tls
{{- else -}}
- --insecure
{{- end -}}
{{- end -}}

{{/* Secrets with certificates by the directory below /run/secrets at which they lie: of this role, and the public one. */}}
{{- define "outrider.tlsSecrets" -}}
{{- $secrets := .root.Values.tlsSecrets -}}
{{- $cluster := list $secrets.gateway $secrets.controller $secrets.target $secrets.draft -}}
{{- if and (without $cluster "") (has "" $cluster) -}}
{{- fail "tlsSecrets: gateway, controller, target and draft are needed together" -}}
{{- end -}}
{{- $found := dict -}}
{{- with index $secrets .role }}{{ $_ := set $found "tls" . }}{{ end -}}
{{- if and (eq .role "gateway") $secrets.public }}{{ $_ := set $found "public-tls" $secrets.public }}{{ end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "outrider.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/outrider}
- {name: shm, mountPath: /dev/shm}
{{- if and .root.Values.clusterSecret (has .role (list "gateway" "controller")) }}
- {name: cluster, mountPath: /run/secrets/cluster, readOnly: true}
{{- end }}
{{- range $folder, $secret := include "outrider.tlsSecrets" . | fromJson }}
- {name: {{ $folder }}, mountPath: /run/secrets/{{ $folder }}, readOnly: true}
{{- end }}
{{- if and .root.Values.models.existingClaim (has .role (list "target" "draft")) }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "outrider.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .placement.shmSize | default "512Mi" | quote }}}
- name: cache
{{- if .root.Values.cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .root.Values.cache.existingClaim | quote }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .root.Values.cache.sizeLimit | quote }}}
{{- end }}
{{- if and .root.Values.clusterSecret (has .role (list "gateway" "controller")) }}
- name: cluster
  secret: {secretName: {{ .root.Values.clusterSecret | quote }}, defaultMode: 0440}
{{- end }}
{{- range $folder, $secret := include "outrider.tlsSecrets" . | fromJson }}
- name: {{ $folder }}
  secret: {secretName: {{ $secret | quote }}, defaultMode: 0440}
{{- end }}
{{- if and .root.Values.models.existingClaim (has .role (list "target" "draft")) }}
- name: models
  persistentVolumeClaim: {claimName: {{ .root.Values.models.existingClaim | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* On an ops port. A start may take as long as a model needs to load; a drain makes a pod unready, and not dead. */}}
{{- define "outrider.probes" -}}
startupProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: {{ .startPeriods }}
livenessProbe:
  httpGet: {path: /livez, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
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
  startupProbe:
    httpGet: {path: /livez, port: "router-ops-{{ $number }}"}
    periodSeconds: 5
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /livez, port: "router-ops-{{ $number }}"}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
{{- end }}
{{- end -}}

{{- define "outrider.plainProcess" -}}
{{- $root := .context.root }}
- name: {{ .name }}
  image: {{ include "outrider.image" .context | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [python, -m, outrider_controller.{{ .module }}]
  args:
    - --metadata
    - $(METADATA_URL)
    {{- include "outrider.tlsArgs" .context | nindent 4 }}
    - --listen
    - 0.0.0.0:{{ .port }}
    - --advertise
    - $(POD_IP):{{ .port }}
    - --ops-listen
    - 0.0.0.0:{{ .opsPort }}
    - --drain-timeout
    - {{ .context.placement.drainTimeoutSeconds | quote }}
    - --log-format
    - {{ $root.Values.logFormat }}
    {{- if eq .module "router" }}
    - --cache-salt-key-file
    - /run/secrets/outrider/salt
    {{- end }}
    {{- if $root.Values.clusterSecret }}
    - --cluster-secret-file
    - /run/secrets/cluster/secret
    {{- end }}
    {{- if eq .module "router" }}
    {{- with .context.placement.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
  env: {{- include "outrider.env" .context | nindent 4 }}
  ports:
    - {name: {{ .portName }}, containerPort: {{ .port }}}
    - {name: {{ .opsName }}, containerPort: {{ .opsPort }}}
  securityContext: {{- include "outrider.containerSecurity" $root | nindent 4 }}
  resources: {{- toYaml .context.placement.resources | nindent 4 }}
  volumeMounts:
    {{- include "outrider.mounts" .context | nindent 4 }}
    - {name: salt, mountPath: /run/secrets/outrider, readOnly: true}
{{- end -}}
