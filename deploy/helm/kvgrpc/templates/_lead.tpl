{{- /* The variables of a lead. The plugin's lead has those of the engine's container. */}}
{{- define "kvgrpc.variables" -}}
{{- $v := .root.Values -}}
{{- $own := printf "$(POD_NAME).%s" (include "kvgrpc.domain" .) -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with .root.Values.fleet.registry }}
# The owner of a Lease is the pod, so that it goes with the pod.
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: KVGRPC_FLEET_REGISTRY
  value: {{ . | quote }}
- name: KVGRPC_FLEET_ROLE
  value: {{ $.component }}
{{- end }}
{{- with .root.Values.fleet.model }}
- name: KVGRPC_FLEET_MODEL
  value: {{ . | quote }}
{{- end }}
- name: KVGRPC_METRICS
  value: {{ printf "0.0.0.0:%d" (int $v.ports.metrics) | quote }}
{{- if $v.lead.sharedDir }}
- name: KVGRPC_SHARED_DIR
  value: /run/kvgrpc-pods
{{- end }}
{{- if $v.tls.enabled }}
# Certificates are for names, so peers dial the name of the pod.
- name: KVGRPC_ADVERTISE
  value: {{ printf "%s:0" $own | quote }}
- name: KVGRPC_TLS_DIR
  value: /etc/kvgrpc/tls
- name: KVGRPC_DIAL_ALLOW
  value: {{ include "kvgrpc.dialled" .root | quote }}
{{- if $v.tls.kvInPlainText }}
- name: KVGRPC_PRIVATE_NETWORKS
  value: {{ include "kvgrpc.dialled" .root | quote }}
{{- end }}
{{- if $v.tls.roles }}
- name: KVGRPC_IDENTITY_ROLES
  value: /etc/kvgrpc/roles/roles.toml
{{- end }}
# `kvgrpc drain` is called at an address that the certificate has.
- name: LEAD_ADDRESS
  value: {{ printf "%s:%d" $own (int $v.ports.grpc) | quote }}
{{- else }}
- name: KVGRPC_ADVERTISE
  value: "$(POD_IP):0"
- name: KVGRPC_INSECURE
  value: "yes"
- name: KVGRPC_DIAL_ALLOW
  value: {{ include "kvgrpc.dialled" .root | quote }}
- name: LEAD_ADDRESS
  value: {{ printf "127.0.0.1:%d" (int $v.ports.grpc) | quote }}
{{- end }}
{{- range $name, $value := $v.lead.settings }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{- define "kvgrpc.mounts" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/kvgrpc/tls, readOnly: true}
{{- if .Values.tls.roles }}
- {name: roles, mountPath: /etc/kvgrpc/roles, readOnly: true}
{{- end }}
{{- end }}
{{- if .Values.lead.sidecar }}
- {name: session, mountPath: /run/kvgrpc}
{{- end }}
{{- if .Values.lead.sharedDir }}
- {name: pods, mountPath: /run/kvgrpc-pods}
{{- end }}
{{- end }}

{{- define "kvgrpc.leadPorts" -}}
- {name: grpc, containerPort: {{ .Values.ports.grpc }}}
- {name: metrics, containerPort: {{ .Values.ports.metrics }}}
{{- end }}

{{- /* The probe of a path of the metrics port. Takes (list $ PATH). */}}
{{- define "kvgrpc.probe" -}}
httpGet: {path: {{ index . 1 }}, port: metrics, scheme: {{ ternary "HTTPS" "HTTP" (index . 0).Values.tls.enabled }}}
timeoutSeconds: 6
{{- end }}

{{- define "kvgrpc.drain" -}}
{{- $drain := printf "timeout %d kvgrpc drain \"$LEAD_ADDRESS\" --wait || true" (int .Values.lead.drainSeconds) -}}
{{- if .Values.lead.sidecar }}
# Kubernetes calls the hooks of all containers at once. The engine's waits for this file.
postStart:
  exec:
    command: [sh, -c, 'rm -f /run/kvgrpc/drained']
preStop:
  exec:
    command: [sh, -c, '{{ $drain }}; : > /run/kvgrpc/drained']
{{- else }}
preStop:
  exec:
    command: [sh, -c, '{{ $drain }}']
{{- end }}
{{- end }}

{{- /* The hook of an engine beside a lead: it lasts as long as the lead's drain, which the engine's memory is for. */}}
{{- define "kvgrpc.outlast" -}}
preStop:
  exec:
    command: [sh, -c, 'for i in $(seq {{ int .Values.lead.drainSeconds }}); do [ -e /run/kvgrpc/drained ] || sleep 1; done']
{{- end }}
