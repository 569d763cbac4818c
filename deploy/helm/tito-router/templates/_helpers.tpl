{{- define "tito.name" -}}
{{- if contains "tito-router" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-tito-router" (.Release.Name | trunc 40 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "tito.selector" -}}
app.kubernetes.io/name: tito-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tito.labels" -}}
{{ include "tito.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tito.stored" -}}
{{- if or .Values.store.url .Values.store.existingSecret }}yes{{ end -}}
{{- end -}}

{{- define "tito.keyed" -}}
{{- if or .Values.keys.client .Values.keys.admin .Values.keys.existingSecret }}yes{{ end -}}
{{- end -}}
