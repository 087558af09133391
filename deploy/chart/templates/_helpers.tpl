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
{{- with index $root.Values.image.digests (index . 1) }}@{{ . }}{{ end }}
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

{{- /* A part of the chart is a dict: `root`, its `name`, which is its component and names its objects, the `values` that
     it takes, and their `path` for messages. These helpers render what all parts have in common. */}}
{{- define "loraplex.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .root.Release.Name }}-{{ .name }}
  labels:
    {{- include "loraplex.labels" .root | nindent 4 }}
  {{- with merge (dict) (dig "serviceAccount" "annotations" dict .values) .root.Values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
# Pods call no Kubernetes API, but for the operator's, which mounts its token itself.
automountServiceAccountToken: false
{{- end }}

{{- define "loraplex.podMetadata" -}}
labels:
  {{- include "loraplex.selector" (list .root .name) | nindent 2 }}
  {{- if not .versionless }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
  {{- end }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- range $label, $value := .values.podLabels }}
  {{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "loraplex/" $label) }}
  {{- fail (printf "%s.podLabels: %s is the chart's own, by which it finds its pods" $.path $label) }}
  {{- end }}
  {{ $label }}: {{ $value | quote }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) (.values.podAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Without service links Kubernetes sets no variables such as LORAPLEX_ROUTER_PORT, which the programs would read as
     their settings. */}}
{{- define "loraplex.pod" -}}
{{- $values := .root.Values -}}
enableServiceLinks: false
automountServiceAccountToken: {{ eq .name "operator" }}
serviceAccountName: {{ .root.Release.Name }}-{{ .name }}
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
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $name := list "nodeSelector" "affinity" "tolerations" }}
{{- with index $.values $name }}
{{ $name }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A container's variables: the chart's own, a list `env` of the part, and those of its values. */}}
{{- define "loraplex.env" -}}
{{- $own := list }}
{{- range .env }}
{{- $own = append $own .name }}
{{- end }}
{{- range .values.env }}
{{- if has .name $own }}
{{- fail (printf "%s.env: %s is set by the chart" $.path .name) }}
{{- end }}
{{- end }}
{{- with concat (.env | default list) (.values.env | default list) }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat (.envFrom | default list) (.values.envFrom | default list) }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The variables of those who call the store as its first operator. */}}
{{- define "loraplex.operatorEnv" -}}
{{- if include "loraplex.secured" . }}
- {name: LORAPLEX_CA, value: /etc/loraplex/tls/ca.crt}
- {name: LORAPLEX_API_KEY_FILE, value: /etc/loraplex/keys/operator.key}
{{- end }}
{{- end }}

{{- define "loraplex.spread" -}}
topologySpreadConstraints:
  {{- $selector := include "loraplex.selector" (list .root .name) }}
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

{{- define "loraplex.podName" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- end }}

{{- define "loraplex.certificateFlags" -}}
{{- if include "loraplex.secured" . }}
- --tls-cert=/etc/loraplex/tls/tls.crt
- --tls-key=/etc/loraplex/tls/tls.key
- --tls-ca=/etc/loraplex/tls/ca.crt
{{- end }}
{{- end }}

{{- /* The variable with the URL of a cell's Redis, whose user is that of a role; call with (list $ "LORAPLEX_REDIS_URL"
     "main" "router"). */}}
{{- define "loraplex.redisVariable" -}}
{{- $root := index . 0 }}{{ $cell := index . 2 }}{{ $role := index . 3 -}}
{{- $secret := $root.Values.redis.urlSecret -}}
{{- if ne $cell "main" }}{{ $secret = (index $root.Values.redis.cells $cell | default dict).urlSecret }}{{ end -}}
{{- $host := printf "%s-%s" $root.Release.Name (include "loraplex.valkey" $cell) -}}
- name: {{ index . 1 }}
  {{- if not $root.Values.redis.embedded }}
  valueFrom: {secretKeyRef: {name: {{ $secret.name }}, key: {{ index $secret (printf "%sKey" $role) | default $role }}}}
  {{- else if include "loraplex.secured" $root }}
  value: rediss://{{ $role }}@{{ $host }}.{{ $root.Release.Namespace }}.svc:6379?password_file=/etc/loraplex/redis/password&ssl_ca_certs=/etc/loraplex/tls/ca.crt
  {{- else }}
  value: redis://{{ $host }}:6379
  {{- end }}
{{- end }}

{{- /* The component of a cell's embedded Valkey server; call with the cell's name. */}}
{{- define "loraplex.valkey" -}}
valkey{{ if ne . "main" }}-{{ . }}{{ end }}
{{- end }}

{{- /* The variables of a router: the URLs of the cells' Redis, and its setting `cells`, which names them. */}}
{{- define "loraplex.cells" -}}
{{- include "loraplex.redisVariable" (list . "LORAPLEX_REDIS_URL" "main" "router") }}
{{- if .Values.redis.cells }}
{{- $words := list "main" }}
{{- range $cell, $_ := .Values.redis.cells }}
{{- $variable := printf "REDIS_URL_%s" ($cell | upper | replace "-" "_") }}
{{- include "loraplex.redisVariable" (list $ $variable $cell "router") | nindent 0 }}
{{- $words = append $words (printf "%s=$(%s)" $cell $variable) }}
{{- end }}
- {name: LORAPLEX_ROUTER_CELLS, value: {{ join " " $words | quote }}}
{{- end }}
{{- end }}

{{- /* Mounts and volumes of a part's values, and of the certificates and keys that are for its `role`: that of a store,
     router, worker or gateway, of an operator, or none. */}}
{{- /* Whether a part reads tokens, and so the file of their issuers. */}}
{{- define "loraplex.readsTokens" -}}
{{- $gateway := and (eq .role "gateway") .root.Values.gateway.signIn.url }}
{{- if and .root.Values.credentials.jwt.issuers (or $gateway (has .role (list "router" "store"))) }}true{{ end }}
{{- end }}

{{- define "loraplex.mounts" -}}
{{- $root := .root -}}
- {name: tmp, mountPath: /tmp}
{{- if and .role (include "loraplex.secured" $root) }}
- {name: tls, mountPath: /etc/loraplex/tls, readOnly: true}
{{- if not (has .role (list "gateway" "batches")) }}
- {name: keys, mountPath: /etc/loraplex/keys, readOnly: true}
{{- end }}
{{- end }}
{{- if include "loraplex.readsTokens" . }}
- {name: issuers, mountPath: /etc/loraplex/issuers, readOnly: true}
{{- if eq .role "gateway" }}
- {name: sign-in, mountPath: /etc/loraplex/sign-in, readOnly: true}
{{- end }}
{{- end }}
{{- if and (or $root.Values.redis.caSecret $root.Values.redis.usersSecret) (has .role (list "router" "worker")) }}
- {name: redis, mountPath: /etc/loraplex/redis, readOnly: true}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "loraplex.volumes" -}}
{{- $root := .root -}}
{{- $credentials := $root.Values.credentials -}}
- {name: tmp, emptyDir: {}}
{{- if and .role (include "loraplex.secured" $root) }}
- name: tls
  secret: {secretName: {{ include "loraplex.certificate" (list $root (ternary "store" .role (eq .role "operator"))) }}}
{{- if not (has .role (list "gateway" "batches")) }}
- name: keys
  secret:
    secretName: {{ $credentials.secret.name }}
    items:
      {{- if has .role (list "router" "worker") }}
      - {key: {{ $credentials.secret.jobKey }}, path: job.key}
      {{- else }}
      - {key: {{ $credentials.secret.operatorKey }}, path: operator.key}
      {{- end }}
{{- end }}
{{- end }}
{{- if include "loraplex.readsTokens" . }}
- name: issuers
  configMap: {name: {{ $root.Release.Name }}-issuers}
{{- if eq .role "gateway" }}
- name: sign-in
  secret: {secretName: {{ $root.Values.gateway.signIn.secret }}}
{{- end }}
{{- end }}
{{- if has .role (list "router" "worker") }}
{{- with $root.Values.redis.usersSecret }}
- name: redis
  secret: {secretName: {{ . }}, items: [{key: {{ $.role }}, path: password}]}
{{- end }}
{{- with $root.Values.redis.caSecret }}
- name: redis
  secret: {secretName: {{ . }}}
{{- end }}
{{- end }}
{{- range .values.extraVolumes }}
{{- if has .name (list "tmp" "tls" "keys" "issuers" "sign-in" "redis" "home" "data" "model" "shm" "config" "files" "users") }}
{{- fail (printf "%s.extraVolumes: the chart has a volume %s; give it another name" $.path .name) }}
{{- end }}
- {{ toJson . }}
{{- end }}
{{- end }}

{{- define "loraplex.jwtFlags" -}}
{{- if .Values.credentials.jwt.issuers }}
- --jwt-issuers=/etc/loraplex/issuers/issuers.json
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

{{- /* The model of a pool, or the revision of it that the pool names, as JSON; call with (list $ "POOL" WORKER). */}}
{{- define "loraplex.modelOf" -}}
{{- $root := index . 0 }}{{ $pool := index . 1 }}{{ $worker := index . 2 -}}
{{- $model := index $root.Values.models $worker.model | required (printf "workers.%s.model: %s is not one of models" $pool $worker.model) -}}
{{- with $worker.revision -}}
{{- $model = index ($model.revisions | default dict) . | required (printf "workers.%s.revision: %s is not one of models.%s.revisions" $pool . $worker.model) -}}
{{- end -}}
{{- toJson $model -}}
{{- end }}

{{- /* A model's files at /models/base: init container, volume and mount of a part's pod; the part has `model` and `image`. */}}
{{- define "loraplex.modelInit" -}}
{{- $root := .root -}}
{{- $model := .model -}}
{{- if or $model.hub $model.bucket .wait }}
initContainers:
  {{- with .wait }}
  # The first revision that a store gets is live at once.
  - name: wait
    image: {{ include "loraplex.image" (list $root "store") }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- include "loraplex.container" $root | nindent 4 }}
    command: [sh, -c, {{ . | quote }}]
    {{- include "loraplex.env" (merge (dict "env" $.callerEnv) $) | nindent 4 }}
    volumeMounts:
      - {name: home, mountPath: /var/lib/loraplex}
      {{- include "loraplex.mounts" $ | nindent 6 }}
    resources: {requests: {cpu: 50m, memory: 128Mi}, limits: {memory: 512Mi}}
  {{- end }}
  {{- if or $model.hub $model.bucket }}
  - name: download
    {{- include "loraplex.container" $root | nindent 4 }}
    {{- with $model.hub }}
    image: {{ include "loraplex.image" (list $root $.image) }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [hf, download, {{ .repository | quote }}, --revision={{ .revision | default "main" }}, --local-dir=/models/base]
    {{- $env := list (dict "name" "HF_HOME" "value" "/models/.cache") }}
    {{- with .endpoint }}
    {{- $env = append $env (dict "name" "HF_ENDPOINT" "value" .) }}
    {{- end }}
    {{- with .tokenSecret }}
    {{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" .name "key" (.key | default "token")))) }}
    {{- end }}
    {{- include "loraplex.env" (merge (dict "env" $env) $) | nindent 4 }}
    {{- end }}
    {{- with $model.bucket }}
    image: {{ .image | default "rclone/rclone:1.75" }}
    command: [rclone, copy, --stats-one-line, -v, {{ .remote | quote }}, /models/base]
    {{- $env := list (dict "name" "RCLONE_CONFIG" "value" "/tmp/rclone.conf") }}
    {{- $from := list }}
    {{- with .environmentSecret }}
    {{- $from = list (dict "secretRef" (dict "name" .)) }}
    {{- end }}
    {{- include "loraplex.env" (merge (dict "env" $env "envFrom" $from) $) | nindent 4 }}
    {{- end }}
    volumeMounts:
      - {name: model, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
      {{- with $.values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    resources: {requests: {cpu: 250m, memory: 512Mi}, limits: {memory: 2Gi}}
  {{- end }}
{{- end }}
{{- end }}


{{- define "loraplex.modelMount" -}}
{{- if or .model.hub .model.bucket }}
- {name: model, mountPath: /models}
{{- else if .model.volume }}
- {name: model, mountPath: /models/base, readOnly: true}
{{- end }}
{{- end }}

{{- define "loraplex.modelVolume" -}}
{{- if or .model.hub .model.bucket }}
- name: model
  emptyDir: {sizeLimit: {{ .disk }}}
{{- else if .model.volume }}
- name: model
  {{- toYaml .model.volume | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Whether the scaler may leave a model without workers: routers then keep its requests. */}}
{{- define "loraplex.scalesFromZero" -}}
{{- range .Values.workers }}
{{- $worker := mergeOverwrite (deepCopy $.Values.workerDefaults) . }}
{{- if and $.Values.scaler.enabled $worker.scaled (eq (int $worker.minReplicas) 0) }}true{{ end }}
{{- end }}
{{- end }}
