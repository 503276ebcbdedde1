//! A gateway serves exported Services only, whatever names its clients send.

use anyhow::ensure;
use tulle_tests::linked_clusters::LinkedClusters;

use super::traffic::GATEWAY_ID;

/// `west` has a mirror that nobody has exported: a Service with the address of the gateway of `east` and the name of a Service of
/// `east`, as anyone with access to a namespace of `west` can create it.
pub(super) async fn the_gateway_serves_only_exported_services(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    east.apply(INTERNAL).await.unwrap();
    let gateway = "get endpoints web-east -n shop -o jsonpath={.subsets[0].addresses[0].ip}";
    let gateway = west.kubectl(gateway).await.unwrap();
    let mirror = MIRROR.replace("@gateway", &gateway).replace("@identity", GATEWAY_ID);
    west.apply(&mirror).await.unwrap();
    let line = "unexported:80/ --rate=20 --requests=20";
    let refused = async || {
        let report = linked.load(line).await?;
        let is_refused = |error: &String| error.starts_with("status 404: gateway-not-exported;");
        ensure!(
            report.failed == report.requests && report.errors.keys().all(is_refused),
            "{report:?}"
        );
        Ok(())
    };
    west.cluster
        .wait_until("the gateway refuses requests", refused)
        .await
        .unwrap();
    // Only the label was missing.
    east.kubectl("label -n shop service internal mirror.linkerd.io/exported=true")
        .await
        .unwrap();
    let served = async || {
        let report = linked.load(line).await?;
        ensure!(report.failed == 0, "{report:?}");
        Ok(())
    };
    west.cluster
        .wait_until("the gateway serves the exported Service", served)
        .await
        .unwrap();
    east.kubectl("delete -n shop service/internal").await.unwrap();
    // The Endpoints are deleted with the Service.
    west.kubectl("delete -n shop service/unexported").await.unwrap();
}

const INTERNAL: &str = "
apiVersion: v1
kind: Service
metadata: {name: internal, namespace: shop}
spec:
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: http}]
";
const MIRROR: &str = "
apiVersion: v1
kind: Service
metadata: {name: unexported, namespace: shop}
spec:
  ports: [{name: http, port: 80}]
---
apiVersion: v1
kind: Endpoints
metadata:
  name: unexported
  namespace: shop
  annotations:
    mirror.linkerd.io/remote-svc-fq-name: internal.shop.svc.east.test
    mirror.linkerd.io/remote-gateway-identity: @identity
subsets:
  - addresses: [{ip: '@gateway'}]
    ports: [{name: http, port: 4143}]
";
