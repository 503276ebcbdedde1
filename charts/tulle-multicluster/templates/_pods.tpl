{{/* Parts that the Deployments share. */}}

{{/* Metadata of a Deployment. .name, .component, .labels: additional labels, .root */}}
{{- define "tulle-multicluster.deployment-metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  app.kubernetes.io/name: {{ .component }}
  app.kubernetes.io/part-of: Linkerd
  app.kubernetes.io/version: {{ include "tulle-multicluster.version" .root | quote }}
  component: {{ .component }}
  {{- include "tulle-multicluster.labels" . | nindent 2 }}
annotations:
  {{- include "tulle-multicluster.created-by" .root | nindent 2 }}
{{- end }}

{{/* .replicas, .selector: labels that select the pods, .antiAffinity, .root */}}
{{- define "tulle-multicluster.deployment-head" -}}
replicas: {{ .replicas }}
revisionHistoryLimit: {{ .root.Values.revisionHistoryLimit }}
selector:
  matchLabels:
    {{- toYaml .selector | nindent 4 }}
{{- if .antiAffinity }}
# Each node has one pod at most, so a new pod can need the node of an old one.
strategy:
  rollingUpdate:
    maxUnavailable: 1
{{- end }}
{{- end }}

{{/* Metadata of pods. .selector: labels that select them, .fixed: annotations, .annotations: those of the values, .root */}}
{{- define "tulle-multicluster.pod-metadata" -}}
{{- $annotations := merge (dict "cluster-autoscaler.kubernetes.io/safe-to-evict" "true" "linkerd.io/inject" "enabled") .fixed -}}
annotations:
  {{- include "tulle-multicluster.created-by" .root | nindent 2 }}
  {{- toYaml (mergeOverwrite $annotations .root.Values.podAnnotations (.annotations | default dict)) | nindent 2 }}
labels:
  {{- include "tulle-multicluster.labels" (dict "root" .root "labels" (mergeOverwrite (dict) .root.Values.podLabels .selector)) | nindent 2 }}
{{- end }}

{{/* .selector, .nodeSelector, .tolerations, .nodeAffinity, .antiAffinity, .root */}}
{{- define "tulle-multicluster.pod-placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .antiAffinity .nodeAffinity }}
affinity:
  {{- with .nodeAffinity }}
  nodeAffinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .antiAffinity }}
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - labelSelector:
          matchLabels:
            {{- toYaml .selector | nindent 12 }}
        topologyKey: kubernetes.io/hostname
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          labelSelector:
            matchLabels:
              {{- toYaml .selector | nindent 14 }}
          topologyKey: topology.kubernetes.io/zone
  {{- end }}
{{- end }}
automountServiceAccountToken: false
securityContext:
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* .UID, .GID */}}
{{- define "tulle-multicluster.container-security" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  runAsUser: {{ int64 .UID }}
  {{- if ge (int64 .GID) 0 }}
  runAsGroup: {{ int64 .GID }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/*
The container of a service mirror. .name, .port: name of its admin port, .args: its own arguments, .env: lists of additional
variables, .of: its values, .root
*/}}
{{- define "tulle-multicluster.service-mirror" -}}
- name: {{ .name }}
  image: {{ .of.image.name }}:{{ .of.image.version | default (include "tulle-multicluster.version" .root) }}
  imagePullPolicy: {{ .of.image.pullPolicy | default .root.Values.imagePullPolicy }}
  args:
    - service-mirror
    - -namespace={{ .root.Release.Namespace }}
    {{- range .args }}
    - {{ . | quote }}
    {{- end }}
    - -log-level={{ .of.logLevel }}
    - -log-format={{ .of.logFormat }}
  env:
    # The holder of the Lease, by which tools find the active pod. The host name can be a shortened name of the pod.
    - name: HOSTNAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    {{- range .env }}
    {{- with . }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
  ports:
    - name: {{ .port }}
      containerPort: 9999
  livenessProbe:
    httpGet:
      path: /live
      port: 9999
    initialDelaySeconds: 10
  readinessProbe:
    httpGet:
      path: /ready
      port: 9999
    # Changes of readiness take effect quickly: 1 second to become ready, 7 seconds to become unready.
    periodSeconds: 1
    failureThreshold: 7
  {{- with include "tulle-multicluster.resources" .of.resources }}
  resources:
    {{- trim . | nindent 4 }}
  {{- end }}
  {{- include "tulle-multicluster.container-security" .of | nindent 2 }}
  volumeMounts:
    - name: kube-api-access
      mountPath: /var/run/secrets/kubernetes.io/serviceaccount
      readOnly: true
{{- end }}

{{/* Credentials of a client of the API server, instead of the default mount of a service account. */}}
{{- define "tulle-multicluster.kube-api-access" -}}
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

{{/* With anti-affinity. .name, .labels, .selector, .antiAffinity, .root */}}
{{- define "tulle-multicluster.disruption-budget" -}}
{{- if .antiAffinity }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tulle-multicluster.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- toYaml .selector | nindent 6 }}
{{- end }}
{{- end }}

{{/* .name, .labels, .root */}}
{{- define "tulle-multicluster.service-account" }}
{{- $labels := .labels | default dict }}
{{- with .component }}
{{- $labels = merge (dict "component" .) $labels }}
{{- end }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "tulle-multicluster.metadata" (dict "root" .root "name" .name "labels" $labels) | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
