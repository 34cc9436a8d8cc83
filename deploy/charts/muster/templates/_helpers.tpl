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

{{/* Probes on the plain port. Liveness never looks at other services (a restart cures nothing there). */}}
{{- define "muster.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 3
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}

{{/* Control planes only: that is where the attester, the cluster's CA and the audit log are. */}}
{{- define "muster.placement" -}}
nodeSelector:
  kubernetes.io/os: linux
  node-role.kubernetes.io/control-plane: ""
tolerations:
  - {key: node-role.kubernetes.io/control-plane, operator: Exists, effect: NoSchedule}
  - {key: CriticalAddonsOnly, operator: Exists}
priorityClassName: system-cluster-critical
{{- end }}

{{/* How soon client-go notices that the API server behind a connection has died with its node: 8 s instead of 45. */}}
{{- define "muster.apiHealth" -}}
- {name: HTTP2_READ_IDLE_TIMEOUT_SECONDS, value: "5"}
- {name: HTTP2_PING_TIMEOUT_SECONDS, value: "3"}
{{- end }}
