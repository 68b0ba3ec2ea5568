{{- define "kvgrpc.name" -}}
{{- printf "%s-kvgrpc" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- /* The labels of one component. Takes (dict "root" $ "component" NAME). */}}
{{- define "kvgrpc.selector" -}}
app.kubernetes.io/name: kvgrpc
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvgrpc.labels" -}}
{{ include "kvgrpc.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- /* The domain of the pods of one side. A pod's own name stands before it. */}}
{{- define "kvgrpc.domain" -}}
{{ include "kvgrpc.name" .root }}-{{ .component }}.{{ .root.Release.Namespace }}.svc
{{- end }}

{{- /* The names of all engines, which leads dial and certificates have. */}}
{{- define "kvgrpc.peers" -}}
{{- $names := list -}}
{{- range $side := list "prefill" "decode" -}}
{{- $base := printf "%s-%s" (include "kvgrpc.name" $) $side -}}
{{- range $i := until (int (index $.Values $side).replicas) -}}
{{- $names = append $names (printf "%s-%d.%s" $base $i (include "kvgrpc.domain" (dict "root" $ "component" $side))) -}}
{{- end -}}
{{- end -}}
{{- join "," $names -}}
{{- end }}

{{- define "kvgrpc.secret" -}}
{{- $stated := ternary .root.Values.tls.prefillSecret .root.Values.tls.decodeSecret (eq .component "prefill") -}}
{{- $stated | default (printf "%s-%s-tls" (include "kvgrpc.name" .root) .component) -}}
{{- end }}

{{- define "kvgrpc.check" -}}
{{- $pod := printf "%s-prefill-000" (include "kvgrpc.name" .) -}}
{{- $address := printf "%s.%s:65535" $pod (include "kvgrpc.domain" (dict "root" . "component" "prefill")) -}}
{{- if gt (add (len $pod) (len $address)) 140 -}}
{{- fail "the names of release and namespace are too long: a grant carries a pod's name twice, in 140 bytes" -}}
{{- end -}}
{{- if and (not .Values.tls.enabled) (not .Values.insecure) -}}
{{- fail "a lead off loopback needs tls.enabled, or insecure" -}}
{{- end -}}
{{- if and .Values.tls.enabled .Values.insecure -}}
{{- fail "tls.enabled and insecure exclude each other" -}}
{{- end -}}
{{- if and (not .Values.tls.enabled) (not .Values.lead.dialAllow) -}}
{{- fail "without TLS leads dial addresses of pods: lead.dialAllow needs their network, such as [10.244.0.0/16]" -}}
{{- end -}}
{{- end }}
