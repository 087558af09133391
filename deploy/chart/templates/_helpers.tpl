{{- define "loraplex.labels" -}}
app.kubernetes.io/name: loraplex
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Labels that select the pods of a component; call with (list $ "router"). */}}
{{- define "loraplex.selector" -}}
app.kubernetes.io/name: loraplex
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "loraplex.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}loraplex-{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{- define "loraplex.secured" -}}
{{- if ne .Values.credentials.mode "none" }}true{{ end }}
{{- end }}

{{- /* The Secret with a component's certificate. */}}
{{- define "loraplex.certificate" -}}
{{- $root := index . 0 -}}
{{- if eq $root.Values.credentials.mode "certManager" }}{{ $root.Release.Name }}-{{ index . 1 }}-tls
{{- else }}{{ index $root.Values.credentials.secrets (index . 1) | required (printf "credentials.secrets.%s: name its Secret" (index . 1)) }}{{ end }}
{{- end }}

{{- /* What pods of all components have: call with (list $ "router"). Without service links Kubernetes sets no variables
     such as LORAPLEX_ROUTER_PORT, which the programs would read as their settings. */}}
{{- define "loraplex.pod" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values -}}
{{- $operator := eq (index . 1) "operator" -}}
enableServiceLinks: false
automountServiceAccountToken: {{ $operator }}
serviceAccountName: {{ $root.Release.Name }}-{{ ternary "operator" "loraplex" $operator }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $values.podSecurity.runAsUser }}
  runAsGroup: {{ $values.podSecurity.fsGroup }}
  fsGroup: {{ $values.podSecurity.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "loraplex.spread" -}}
topologySpreadConstraints:
  {{- $selector := include "loraplex.selector" . }}
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}

{{- define "loraplex.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Probes of the metrics' port: docs/guides/operating.md#ports-and-probes. Call with the seconds that a start may take. */}}
{{- define "loraplex.probes" -}}
startupProbe:
  httpGet: {path: /startupz, port: metrics}
  periodSeconds: 5
  failureThreshold: {{ div (add . 4) 5 }}
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 2
  failureThreshold: 1
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 8
  failureThreshold: 3
{{- end }}

{{- define "loraplex.certificateFlags" -}}
{{- if include "loraplex.secured" . }}
- --tls-cert=/etc/loraplex/tls/tls.crt
- --tls-key=/etc/loraplex/tls/tls.key
- --tls-ca=/etc/loraplex/tls/ca.crt
{{- end }}
{{- end }}

{{- /* The variable with the URL of a cell's Redis; call with (list $ "LORAPLEX_REDIS_URL" "main"). */}}
{{- define "loraplex.redisVariable" -}}
{{- $root := index . 0 -}}
{{- $cell := index . 2 -}}
{{- $secret := $root.Values.redis.urlSecret -}}
{{- if ne $cell "main" }}{{ $secret = (index $root.Values.redis.cells $cell | default dict).urlSecret }}{{ end -}}
- name: {{ index . 1 }}
  {{- if $root.Values.redis.embedded }}
  value: redis://{{ $root.Release.Name }}-{{ include "loraplex.valkey" $cell }}:6379
  {{- else }}
  valueFrom: {secretKeyRef: {name: {{ $secret.name }}, key: {{ $secret.key }}}}
  {{- end }}
{{- end }}

{{- /* The component of a cell's embedded Valkey server; call with the cell's name. */}}
{{- define "loraplex.valkey" -}}
valkey{{ if ne . "main" }}-{{ . }}{{ end }}
{{- end }}

{{- /* The variables of a router: the URLs of the cells' Redis, and its setting `cells`, which names them. */}}
{{- define "loraplex.cells" -}}
{{- include "loraplex.redisVariable" (list . "LORAPLEX_REDIS_URL" "main") }}
{{- if .Values.redis.cells }}
{{- $words := list "main" }}
{{- range $cell, $_ := .Values.redis.cells }}
{{- $variable := printf "REDIS_URL_%s" ($cell | upper | replace "-" "_") }}
{{- include "loraplex.redisVariable" (list $ $variable $cell) | nindent 0 }}
{{- $words = append $words (printf "%s=$(%s)" $cell $variable) }}
{{- end }}
- {name: LORAPLEX_ROUTER_CELLS, value: {{ join " " $words | quote }}}
{{- end }}
{{- end }}

{{- /* Mounts and volumes of certificates and keys: (list $ "router"). */}}
{{- define "loraplex.mounts" -}}
{{- $root := index . 0 -}}
- {name: tmp, mountPath: /tmp}
{{- if include "loraplex.secured" $root }}
- {name: tls, mountPath: /etc/loraplex/tls, readOnly: true}
{{- if ne (index . 1) "gateway" }}
- {name: keys, mountPath: /etc/loraplex/keys, readOnly: true}
{{- end }}
{{- end }}
{{- if and $root.Values.redis.caSecret (has (index . 1) (list "router" "worker")) }}
- {name: redis, mountPath: /etc/loraplex/redis, readOnly: true}
{{- end }}
{{- end }}

{{- define "loraplex.volumes" -}}
{{- $root := index . 0 -}}
{{- $credentials := $root.Values.credentials -}}
- {name: tmp, emptyDir: {}}
{{- if include "loraplex.secured" $root }}
- name: tls
  secret: {secretName: {{ include "loraplex.certificate" . }}}
{{- if ne (index . 1) "gateway" }}
- name: keys
  secret:
    secretName: {{ $credentials.secret.name }}
    items:
      {{- if has (index . 1) (list "router" "worker") }}
      - {key: {{ $credentials.secret.jobKey }}, path: job.key}
      {{- else }}
      - {key: {{ $credentials.secret.operatorKey }}, path: operator.key}
      {{- end }}
{{- end }}
{{- end }}
{{- if and $root.Values.redis.caSecret (has (index . 1) (list "router" "worker")) }}
- name: redis
  secret: {secretName: {{ $root.Values.redis.caSecret }}}
{{- end }}
{{- end }}

{{- define "loraplex.jwtFlags" -}}
{{- with .Values.credentials.jwt }}
{{- if .issuer }}
- --jwt-issuer={{ .issuer }}
- --jwt-audience={{ .audience }}
- --jwt-jwks={{ .jwks }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The routers' addresses, for gateways: each pod's own name, so that an answer goes on at another router. */}}
{{- define "loraplex.routers" -}}
{{- $root := index . 0 -}}
{{- $port := index . 1 -}}
{{- $addresses := list -}}
{{- range $index := until (int $root.Values.router.replicas) }}
{{- $addresses = append $addresses (printf "%s-router-%d.%s-routers.%s.svc:%d" $root.Release.Name $index $root.Release.Name $root.Release.Namespace (int $port)) }}
{{- end }}
{{- join "," $addresses }}
{{- end }}

{{- /* Names of the Services that clients call: of the edge, and of gateways where an Ingress or a route is in front. */}}
{{- define "loraplex.clientNames" -}}
{{- $names := list }}
{{- range list "edge" "gateway" }}
{{- $names = concat $names (list (printf "%s-%s" $.Release.Name .) (printf "%s-%s.%s.svc" $.Release.Name . $.Release.Namespace)) }}
{{- end }}
{{- join " " $names }}
{{- end }}

{{- define "loraplex.storeHost" -}}
{{ .Release.Name }}-store.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* A model's files at /models/NAME: init containers, volumes and mounts of a pod; call with (list $ "NAME" "worker"). */}}
{{- define "loraplex.modelInit" -}}
{{- $root := index . 0 -}}
{{- $model := index $root.Values.models (index . 1) -}}
{{- if or $model.hub $model.bucket }}
initContainers:
  - name: download
    {{- include "loraplex.container" $root | nindent 4 }}
    {{- with $model.hub }}
    image: {{ include "loraplex.image" (list $root (index $ 2)) }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [hf, download, {{ .repository | quote }}, --revision={{ .revision | default "main" }}, --local-dir=/models/base]
    env:
      - {name: HF_HOME, value: /models/.cache}
      {{- with .endpoint }}
      - {name: HF_ENDPOINT, value: {{ . | quote }}}
      {{- end }}
      {{- with .tokenSecret }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key | default "token" }}}}
      {{- end }}
    {{- end }}
    {{- with $model.bucket }}
    image: {{ .image | default "rclone/rclone:1.75" }}
    command: [rclone, copy, --stats-one-line, -v, {{ .remote | quote }}, /models/base]
    env:
      - {name: RCLONE_CONFIG, value: /tmp/rclone.conf}
    {{- with .environmentSecret }}
    envFrom:
      - secretRef: {name: {{ . }}}
    {{- end }}
    {{- end }}
    volumeMounts:
      - {name: model, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
    resources: {requests: {cpu: 250m, memory: 512Mi}, limits: {memory: 2Gi}}
{{- end }}
{{- end }}

{{- define "loraplex.modelPath" -}}
{{- $model := index (index . 0).Values.models (index . 1) -}}
{{- $model.hash | default "/models/base" }}
{{- end }}

{{- define "loraplex.modelMount" -}}
{{- $model := index (index . 0).Values.models (index . 1) -}}
{{- if or $model.hub $model.bucket }}
- {name: model, mountPath: /models}
{{- else if $model.volume }}
- {name: model, mountPath: /models/base, readOnly: true}
{{- end }}
{{- end }}

{{- define "loraplex.modelVolume" -}}
{{- $model := index (index . 0).Values.models (index . 1) -}}
{{- if or $model.hub $model.bucket }}
- name: model
  emptyDir: {sizeLimit: {{ index . 2 }}}
{{- else if $model.volume }}
- name: model
  {{- toYaml $model.volume | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Whether the scaler may leave a model without workers: routers then keep its requests. */}}
{{- define "loraplex.scalesFromZero" -}}
{{- range .Values.workers }}
{{- $worker := mergeOverwrite (deepCopy $.Values.workerDefaults) . }}
{{- if and $.Values.scaler.enabled $worker.scaled (eq (int $worker.minReplicas) 0) }}true{{ end }}
{{- end }}
{{- end }}
