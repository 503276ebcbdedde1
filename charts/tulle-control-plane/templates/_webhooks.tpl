{{/* Parts of webhooks: Secret and CA. .of: values, .service, .component, .root */}}

{{/* Secret of a webhook with a certificate in the values. Otherwise the webhook generates one. */}}
{{- define "tulle.webhook-secret" -}}
{{- if and .of.crtPEM (not .of.externalSecret) }}
---
apiVersion: v1
kind: Secret
metadata:
  {{- include "tulle.metadata" (dict "root" .root "component" .component "name" (printf "%s-k8s-tls" .service)) | nindent 2 }}
type: kubernetes.io/tls
data:
  tls.crt: {{ .of.crtPEM | trim | b64enc | quote }}
  tls.key: {{ .of.keyPEM | trim | b64enc | quote }}
{{- end }}
{{- end }}

{{- define "tulle.webhook-metadata" -}}
name: {{ .service }}-webhook-config
labels:
  {{- include "tulle.labels" . | nindent 2 }}
annotations:
  {{- include "tulle.created-by" .root | nindent 2 }}
  {{- with .of.injectCaFrom }}
  cert-manager.io/inject-ca-from: {{ . }}
  {{- end }}
  {{- with .of.injectCaFromSecret }}
  cert-manager.io/inject-ca-from-secret: {{ . }}
  {{- end }}
{{- end }}

{{/* Fields of all webhooks except rules and selectors. */}}
{{- define "tulle.webhook-client" -}}
name: {{ .service }}.linkerd.io
clientConfig:
  service:
    name: {{ .service }}
    namespace: {{ .root.Release.Namespace }}
    path: /
  {{- with .of.caBundle | default .of.crtPEM }}
  caBundle: {{ trim . | b64enc | quote }}
  {{- end }}
failurePolicy: {{ .root.Values.webhookFailurePolicy }}
admissionReviewVersions: [v1, v1beta1]
sideEffects: None
{{- end }}

{{/* Volume of a certificate that the webhook does not generate itself. .of: values of the webhook */}}
{{- define "tulle.webhook-volume" -}}
{{- if or .of.externalSecret .of.crtPEM }}
- name: {{ .service }}-tls
  secret:
    secretName: {{ .service }}-k8s-tls
{{- end }}
{{- end }}

{{- define "tulle.webhook-mount" -}}
{{- if or .of.externalSecret .of.crtPEM }}
- name: {{ .service }}-tls
  mountPath: /var/run/linkerd/tls/{{ .service }}
  readOnly: true
{{- end }}
{{- end }}
