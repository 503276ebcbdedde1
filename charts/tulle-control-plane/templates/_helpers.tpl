{{/* The version of images, and what is reported as one. */}}
{{- define "tulle.version" -}}
{{- .Values.linkerdVersion | default .Chart.AppVersion }}
{{- end }}

{{- define "tulle.trust-domain" -}}
{{- .Values.identityTrustDomain | default .Values.clusterDomain }}
{{- end }}

{{/* Labels of an object of a component, or of none: .component, .root; .labels are its own. */}}
{{- define "tulle.labels" -}}
{{- if .component -}}
linkerd.io/control-plane-component: {{ .component }}
{{ end -}}
linkerd.io/control-plane-ns: {{ .root.Release.Namespace }}
{{- with mergeOverwrite (dict) .root.Values.commonLabels (.labels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tulle.created-by" -}}
linkerd.io/created-by: tulle/helm {{ include "tulle.version" . }}
{{- end }}

{{/* Metadata of an object of the release's namespace: .name, .component, .root */}}
{{- define "tulle.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tulle.labels" . | nindent 2 }}
annotations:
  {{- include "tulle.created-by" .root | nindent 2 }}
{{- end }}

{{/* The same for objects of the cluster. */}}
{{- define "tulle.cluster-metadata" -}}
name: {{ .name }}
labels:
  {{- include "tulle.labels" . | nindent 2 }}
annotations:
  {{- include "tulle.created-by" .root | nindent 2 }}
{{- end }}

{{/* {cpu: {request, limit}, …} as a container has it. */}}
{{- define "tulle.resources" -}}
{{- $requests := dict }}
{{- $limits := dict }}
{{- range $name, $of := . }}
{{- if $of.request }}{{ $_ := set $requests $name $of.request }}{{ end }}
{{- if $of.limit }}{{ $_ := set $limits $name $of.limit }}{{ end }}
{{- end }}
{{- if $limits }}
limits:
  {{- toYaml $limits | nindent 2 }}
{{- end }}
{{- if $requests }}
requests:
  {{- toYaml $requests | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The filter of what a process logs. Destination and policy are one process here: where their levels differ, the filter
names both.
*/}}
{{- define "tulle.destination-log-level" -}}
{{- $all := .Values.controllerLogLevel }}
{{- $policy := .Values.policyController.logLevel }}
{{- $levels := list "error" "warn" "info" "debug" "trace" }}
{{- if or (eq $all $policy) (not $policy) }}
{{- $all }}
{{- else }}
{{- if has $all (list "fatal" "panic") }}{{ $all = "error" }}{{ end }}
{{- if has $policy (list "fatal" "panic") }}{{ $policy = "error" }}{{ end }}
{{- if has $all $levels }}warn,tulle={{ $all }}{{ else }}{{ $all }}{{ end -}}
,{{- if has $policy $levels }}tulle_control::policy={{ $policy }}{{ else }}{{ $policy }}{{ end }}
{{- end }}
{{- end }}

{{/* What is wrong with the values as a whole; a schema cannot say it. */}}
{{- define "tulle.check" -}}
{{- if not .Values.identity.externalCA }}
{{- if not .Values.identityTrustAnchorsPEM }}
{{- fail "identityTrustAnchorsPEM is missing: give the mesh's trust anchors with --set-file identityTrustAnchorsPEM=ca.crt, or set identity.externalCA=true and make the ConfigMap linkerd-identity-trust-roots yourself" }}
{{- end }}
{{- end }}
{{- if eq .Values.identity.issuer.scheme "linkerd.io/tls" }}
{{- if not .Values.identity.issuer.tls.crtPEM }}
{{- fail "identity.issuer.tls.crtPEM is missing: give the issuer's certificate with --set-file identity.issuer.tls.crtPEM=issuer.crt, or set identity.issuer.scheme=kubernetes.io/tls and make the Secret linkerd-identity-issuer yourself" }}
{{- end }}
{{- if not .Values.identity.issuer.tls.keyPEM }}
{{- fail "identity.issuer.tls.keyPEM is missing: give the issuer's key with --set-file identity.issuer.tls.keyPEM=issuer.key, or set identity.issuer.scheme=kubernetes.io/tls and make the Secret linkerd-identity-issuer yourself" }}
{{- end }}
{{- end }}
{{- if and (ne (int .Values.proxyInit.closeWaitTimeoutSecs) 0) (not .Values.proxyInit.runAsRoot) }}
{{- fail "proxyInit.closeWaitTimeoutSecs needs proxyInit.runAsRoot=true: only root may change it" }}
{{- end }}
{{- if and .Values.cniEnabled (eq .Values.proxy.inboundMode "tproxy") }}
{{- fail "proxy.inboundMode=tproxy needs cniEnabled=false: a CNI plugin knows one way to redirect" }}
{{- end }}
{{- with .Values.proxy.tracing }}
{{- if .enabled }}
{{- if not .collector.endpoint }}
{{- fail "proxy.tracing.collector.endpoint is missing: tracing is enabled and needs the collector's address" }}
{{- end }}
{{- if not (and .collector.meshIdentity.serviceAccountName .collector.meshIdentity.namespace) }}
{{- fail "proxy.tracing.collector.meshIdentity is missing: give serviceAccountName and namespace of the collector" }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name := list "proxyInjector" "profileValidator" "policyValidator" }}
{{- $webhook := index $.Values $name }}
{{- if and $webhook.injectCaFrom $webhook.injectCaFromSecret }}
{{- fail (printf "%s.injectCaFrom and %s.injectCaFromSecret are both set: the CA comes from one of them" $name $name) }}
{{- end }}
{{- if or $webhook.injectCaFrom $webhook.injectCaFromSecret }}
{{- if $webhook.caBundle }}
{{- fail (printf "%s.caBundle is set beside %s.injectCaFrom or injectCaFromSecret: the CA comes from one of them" $name $name) }}
{{- end }}
{{- if not $webhook.externalSecret }}
{{- fail (printf "%s.injectCaFrom and injectCaFromSecret need %s.externalSecret=true: without it the webhook makes its own certificate" $name $name) }}
{{- end }}
{{- else if and $webhook.externalSecret (not $webhook.caBundle) }}
{{- fail (printf "%s.externalSecret needs the CA that signed it: set %s.caBundle, injectCaFrom or injectCaFromSecret" $name $name) }}
{{- end }}
{{- if ne (empty $webhook.crtPEM) (empty $webhook.keyPEM) }}
{{- fail (printf "%s.crtPEM and %s.keyPEM belong together: set both or none" $name $name) }}
{{- end }}
{{- end }}
{{- end }}
