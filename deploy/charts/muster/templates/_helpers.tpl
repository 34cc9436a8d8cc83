{{/* Labels of every object. */}}
{{- define "muster.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/part-of: muster
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels that select a service's pods. They never change: a DaemonSet's selector is immutable. */}}
{{- define "muster.selector" -}}
app.kubernetes.io/name: {{ . }}
app.kubernetes.io/part-of: muster
{{- end }}

{{/* What every container is denied. */}}
{{- define "muster.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
privileged: false
readOnlyRootFilesystem: true
{{- end }}

{{/* Probes by a command in the container: on the port of metrics whoever has many addresses could take their places, and have the service restarted. Liveness never
     looks at other services (a restart cures nothing there). */}}
{{- define "muster.probes" -}}
startupProbe:
  exec: {command: [/probe, /healthz]}
  periodSeconds: 1
  timeoutSeconds: 3
  failureThreshold: 60
{{- /* A restart makes a busy node busier: only a process that has not answered for a minute is restarted. */}}
livenessProbe:
  exec: {command: [/probe, /healthz]}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  exec: {command: [/probe, /readyz]}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}

{{/* Control planes only: that is where the attester, the cluster's CA and the audit log are. Drivers on workers may give a control plane other labels and taints: none takes these pods from it. */}}
{{- define "muster.placement" -}}
nodeSelector:
  node-role.kubernetes.io/control-plane: ""
tolerations:
  - operator: Exists
priorityClassName: system-node-critical
{{- end }}

{{/* How soon client-go notices that the API server behind a connection has died with its node: 8 s instead of 45. */}}
{{- define "muster.apiHealth" -}}
- {name: HTTP2_READ_IDLE_TIMEOUT_SECONDS, value: "5"}
- {name: HTTP2_PING_TIMEOUT_SECONDS, value: "3"}
{{- end }}

{{/*
UID of the ConfigMap muster-node-access. What the chart can't do without is looked up before helm writes anything: without the list no
node could write, without the other two no pod would get ready. Without a cluster a lookup finds nothing, not even kube-system.
*/}}
{{- define "muster.nodeAccessUID" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" -}}
{{- range list (list "ConfigMap" "muster-node-access") (list "ConfigMap" "muster-cluster") (list "Secret" "muster-kms-root") -}}
{{- if not (lookup "v1" (first .) $.Release.Namespace (last .)) -}}
{{- fail (printf "the %s %s/%s is not there, and nothing was changed. `muster init` makes it in a new cluster, `muster install` in one that is there, before either installs this chart: see docs/install.md. If it was there and is lost, see docs/operate.md." (first .) $.Release.Namespace (last .)) -}}
{{- end -}}
{{- end -}}
{{- (lookup "v1" "ConfigMap" .Release.Namespace "muster-node-access").metadata.uid | quote -}}
{{- else -}}
{{- required (printf "rendered without a cluster, so nodeAccess.uid has to say the UID of the ConfigMap muster-node-access: kubectl -n %s get configmap muster-node-access -o jsonpath={.metadata.uid}" .Release.Namespace) (.Values.nodeAccess).uid | quote -}}
{{- end -}}
{{- end }}
