//! Objects that the pages assume.

/// The namespace of the pages, and clients: `front` is permitted by policies, `other` has another identity and sends
/// requests all the time, and those of `plain` have no identity.
pub(super) const APPLICATION: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Namespace
metadata: {name: plain}
---
apiVersion: v1
kind: Namespace
metadata: {name: steady, annotations: {linkerd.io/inject: enabled}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: front, namespace: shop}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: http}]
---
apiVersion: v1
kind: Service
metadata: {name: front, namespace: shop}
spec:
  selector: {app: front}
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - name: web
          image: ghcr.io/tulle-mesh/bench:0.1.0
          args: [serve, '--http=0.0.0.0:8080']
          ports: [{name: http, containerPort: 8080}]
          readinessProbe: {httpGet: {path: /ready, port: 8080}, periodSeconds: 1}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: front, namespace: shop}
spec:
  selector: {matchLabels: {app: front}}
  template:
    metadata: {labels: {app: front}}
    spec:
      serviceAccountName: front
      containers:
        - name: front
          image: ghcr.io/tulle-mesh/bench:0.1.0
          args: [serve, '--http=0.0.0.0:8080']
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: other, namespace: shop}
spec:
  selector: {matchLabels: {app: other}}
  template:
    metadata: {labels: {app: other}}
    spec:
      containers:
        - name: other
          image: ghcr.io/tulle-mesh/bench:0.1.0
          args: [load, 'web.shop.svc.cluster.local:80/', '--rate=4', '--duration=8760h', '--report-every=60s']
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: balancer, namespace: plain}
spec:
  selector: {matchLabels: {app: balancer}}
  template:
    metadata: {labels: {app: balancer}}
    spec:
      containers:
        - name: balancer
          image: ghcr.io/tulle-mesh/bench:0.1.0
          args: [serve, '--http=0.0.0.0:8080']
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: stranger, namespace: plain}
spec:
  selector: {matchLabels: {app: stranger}}
  template:
    metadata: {labels: {app: stranger}}
    spec:
      containers:
        - name: stranger
          image: ghcr.io/tulle-mesh/bench:0.1.0
          args: [serve, '--http=0.0.0.0:8080']
";

/// Sends requests all the time. Created once the mesh exists, so that its pod has a sidecar.
pub(super) const LOAD: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: load, namespace: steady}
spec:
  selector: {matchLabels: {app: load}}
  template:
    metadata: {labels: {app: load}}
    spec:
      containers:
        - name: load
          image: ghcr.io/tulle-mesh/bench:0.1.0
          args: [load, 'web.shop.svc.cluster.local:80/echo', '--rate=50', '--body-size=200', '--duration=8760h', '--json', '--report-every=1s']
";

/// The definition of a kind of another project, so that objects can be created. No controller of that project runs.
pub(super) fn definition(group: &str, version: &str, kind: &str, plural: &str, scope: &str) -> String {
    let singular = kind.to_lowercase();
    format!(
        "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {{name: {plural}.{group}}}
spec:
  group: {group}
  names: {{kind: {kind}, plural: {plural}, singular: {singular}}}
  scope: {scope}
  versions:
    - name: {version}
      served: true
      storage: true
      schema: {{openAPIV3Schema: {{type: object, x-kubernetes-preserve-unknown-fields: true}}}}
---
"
    )
}
