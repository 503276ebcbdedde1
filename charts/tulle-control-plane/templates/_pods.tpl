{{/* Parts that the Deployments of the components share. .root, and .component if needed. */}}

{{- define "tulle.deployment-metadata" -}}
name: linkerd-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  app.kubernetes.io/name: {{ .component }}
  app.kubernetes.io/part-of: Linkerd
  app.kubernetes.io/version: {{ include "tulle.version" .root | quote }}
  {{- include "tulle.labels" . | nindent 2 }}
annotations:
  {{- include "tulle.created-by" .root | nindent 2 }}
{{- end }}

{{- define "tulle.deployment-head" -}}
{{- $values := .root.Values -}}
replicas: {{ $values.controllerReplicas }}
revisionHistoryLimit: {{ $values.revisionHistoryLimit }}
selector:
  matchLabels:
    linkerd.io/control-plane-component: {{ .component }}
    linkerd.io/control-plane-ns: {{ .root.Release.Namespace }}
    linkerd.io/proxy-deployment: linkerd-{{ .component }}
strategy:
  rollingUpdate:
    maxSurge: {{ $values.deploymentStrategy.rollingUpdate.maxSurge }}
    maxUnavailable: {{ $values.deploymentStrategy.rollingUpdate.maxUnavailable }}
{{- end }}

{{/* Metadata of pods. .annotations: annotations of the component */}}
{{- define "tulle.pod-metadata" -}}
{{- $values := .root.Values -}}
annotations:
  {{- include "tulle.created-by" .root | nindent 2 }}
  {{- if not $values.identity.externalCA }}
  linkerd.io/trust-root-sha256: {{ $values.identityTrustAnchorsPEM | trim | sha256sum }}
  {{- end }}
  cluster-autoscaler.kubernetes.io/safe-to-evict: "true"
  config.linkerd.io/default-inbound-policy: all-unauthenticated
  {{- with .fixed }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with mergeOverwrite (dict) $values.podAnnotations .annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
labels:
  {{- include "tulle.labels" . | nindent 2 }}
  linkerd.io/workload-ns: {{ .root.Release.Namespace }}
  linkerd.io/proxy-deployment: linkerd-{{ .component }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "tulle.pod-placement" -}}
{{- $values := .root.Values -}}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or $values.enablePodAntiAffinity $values.nodeAffinity }}
affinity:
  {{- with $values.nodeAffinity }}
  nodeAffinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $values.enablePodAntiAffinity }}
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - labelSelector:
          matchLabels:
            linkerd.io/control-plane-component: {{ .component }}
        topologyKey: kubernetes.io/hostname
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          labelSelector:
            matchLabels:
              linkerd.io/control-plane-component: {{ .component }}
          topologyKey: topology.kubernetes.io/zone
  {{- end }}
{{- end }}
automountServiceAccountToken: false
securityContext:
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "tulle.container-image" -}}
image: {{ .root.Values.controllerImage }}:{{ .root.Values.controllerImageVersion | default (include "tulle.version" .root) }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
{{- end }}

{{- define "tulle.container-security" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  runAsUser: {{ .root.Values.controllerUID }}
  {{- if ge (int .root.Values.controllerGID) 0 }}
  runAsGroup: {{ .root.Values.controllerGID }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* Probes. .port: admin port, .of: values of the component */}}
{{- define "tulle.probes" -}}
livenessProbe:
  httpGet:
    path: /ping
    port: {{ .port }}
  initialDelaySeconds: 10
  timeoutSeconds: {{ .of.livenessProbe.timeoutSeconds }}
readinessProbe:
  httpGet:
    path: /ready
    port: {{ .port }}
  # Changes of readiness take effect quickly: 1 second to become ready, 7 seconds to become unready.
  periodSeconds: 1
  failureThreshold: 7
  timeoutSeconds: {{ .of.readinessProbe.timeoutSeconds }}
{{- end }}

{{/* Flags of all components. .kubeAPI: overrides of the component */}}
{{- define "tulle.common-args" -}}
{{- $kubeAPI := .root.Values.kubeAPI -}}
{{- $overrides := .kubeAPI | default dict -}}
- -controller-namespace={{ .root.Release.Namespace }}
- -identity-trust-domain={{ include "tulle.trust-domain" .root }}
- -log-format={{ .root.Values.controllerLogFormat }}
- -kube-apiclient-qps={{ $overrides.clientQPS | default $kubeAPI.clientQPS }}
- -kube-apiclient-burst={{ $overrides.clientBurst | default $kubeAPI.clientBurst }}
{{- end }}

{{/* Additional arguments of components. .of: list of their values */}}
{{- define "tulle.added-args" -}}
{{- range .of }}
{{- range concat .additionalArgs .experimentalArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tulle.added-env" -}}
{{- $all := list }}
{{- range .of }}
{{- $all = concat $all .additionalEnv .experimentalEnv }}
{{- end }}
{{- with $all }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Credentials of a client of the API server, instead of the default mount of a service account. */}}
{{- define "tulle.kube-api-access" -}}
- name: kube-api-access
  projected:
    defaultMode: 420
    sources:
      - serviceAccountToken:
          expirationSeconds: 3607
          path: token
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                apiVersion: v1
                fieldPath: metadata.namespace
{{- end }}

{{- define "tulle.kube-api-access-mount" -}}
- name: kube-api-access
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end }}

{{- define "tulle.trust-roots" -}}
- name: trust-roots
  configMap:
    name: linkerd-identity-trust-roots
{{- end }}

{{- define "tulle.trust-roots-mount" -}}
- name: trust-roots
  mountPath: /var/run/linkerd/identity/trust-roots
  readOnly: true
{{- end }}

{{- define "tulle.disruption-budget" -}}
{{- if .root.Values.enablePodDisruptionBudget }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tulle.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .root.Values.controller.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      linkerd.io/control-plane-component: {{ .component }}
{{- end }}
{{- end }}
