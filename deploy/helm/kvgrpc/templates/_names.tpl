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

{{- /* What the leads of this release may dial. With TLS all of them have names. */}}
{{- define "kvgrpc.dialled" -}}
{{- $names := ternary (list (include "kvgrpc.peers" .)) list .Values.tls.enabled -}}
{{- concat $names .Values.lead.dialAllow | compact | join "," -}}
{{- end }}

{{- /* The registry that servers of the fleet read. */}}
{{- define "kvgrpc.fleetRegistry" -}}
{{- $labels := printf "app.kubernetes.io/name=kvgrpc,app.kubernetes.io/instance=%s" .Release.Name -}}
{{- $own := printf "kubernetes://?selector=%s,app.kubernetes.io/component in (prefill,decode)" $labels -}}
{{- .Values.fleet.registry | default (ternary (printf "%s&domain=svc" $own) $own .Values.tls.enabled) -}}
{{- end }}

{{- define "kvgrpc.secret" -}}
{{- $stated := index .root.Values.tls (printf "%sSecret" .component) -}}
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
{{- if and .Values.fleet.picker.enabled (not .Values.fleet.enabled) -}}
{{- fail "fleet.picker needs fleet.enabled" -}}
{{- end -}}
{{- if and .Values.fleet.picker.enabled (not .Values.fleet.model) -}}
{{- fail "fleet.picker needs fleet.model" -}}
{{- end -}}
{{- if and .Values.fleet.picker.inferencePool (not .Values.fleet.picker.enabled) -}}
{{- fail "fleet.picker.inferencePool needs fleet.picker.enabled" -}}
{{- end -}}
{{- if and .Values.fleet.enabled (hasPrefix "file:" .Values.fleet.registry) -}}
{{- fail "servers of the fleet have no file of engines: leave fleet.registry empty, and they read EndpointSlices" -}}
{{- end -}}
{{- if and (not .Values.tls.enabled) (not .Values.lead.dialAllow) -}}
{{- fail "without TLS leads dial addresses of pods: lead.dialAllow needs their network, such as [10.244.0.0/16]" -}}
{{- end -}}
{{- end }}
