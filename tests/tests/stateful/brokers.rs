//! Brokers, stores that elect leaders, and other servers.

use tulle_tests::images::Image;

use super::server::{Readiness, Server, TEN_MIB, script};

pub(super) const ALL: [Server; 10] = [RABBITMQ, ZOOKEEPER, KAFKA, ETCD, NATS, MOSQUITTO, LDAP, SSH, SMTP, FTP];

const BROKER: Server = Server {
    image: Image::Brokers,
    ..Server::DEFAULT
};

const RABBITMQ: Server = Server {
    name: "rabbitmq",
    port: 5672,
    start: "
export HOME=/data RABBITMQ_MNESIA_BASE=/data/mnesia RABBITMQ_LOGS=- RABBITMQ_NODENAME=rabbit@localhost
export RABBITMQ_LOG_BASE=/data ERL_CRASH_DUMP=/data/crash RABBITMQ_CONFIG_FILE=/tmp/rabbitmq.conf RABBITMQ_ENABLED_PLUGINS_FILE=/tmp/plugins
printf '%s\\n' \"listeners.tcp.default = $PORT\" 'loopback_users.guest = false' > /tmp/rabbitmq.conf
exec /usr/lib/rabbitmq/bin/rabbitmq-server",
    version: "ls -d /usr/lib/rabbitmq/lib/rabbitmq_server-*",
    client: "url=amqp://guest:guest@$host:$port",
    query: script(
        "amqp-declare-queue -u $url -q a
amqp-publish -u $url -r a -b 42
amqp-get -u $url -q a",
        "a\n42",
    ),
    small_query: Some(script("amqp-declare-queue -u $url -q a", "a")),
    large: Some(script(
        "amqp-declare-queue -u $url -q big >&2
head -c 10485760 /dev/zero | amqp-publish -u $url -r big
amqp-get -u $url -q big | wc -c",
        TEN_MIB,
    )),
    idle: Some(script(
        "amqp-declare-queue -u $url -q idle
amqp-consume -u $url -q idle -c 1 cat & consumer=$!
sleep $idle
amqp-publish -u $url -r idle -b 42
wait $consumer",
        "idle\n42",
    )),
    ..BROKER
};

const ZOOKEEPER: Server = Server {
    name: "zookeeper",
    port: 2181,
    start: "
printf '%s\\n' tickTime=2000 dataDir=/data/zookeeper clientPort=$PORT admin.enableServer=false '4lw.commands.whitelist=*' > /tmp/zoo.cfg
exec java -Xmx256m -Djute.maxbuffer=16777216 -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' \\
  org.apache.zookeeper.server.quorum.QuorumPeerMain /tmp/zoo.cfg",
    readiness: Readiness::Script("echo ruok | nc 127.0.0.1 $PORT | grep imok"),
    version: "ls /usr/share/brokers/zookeeper-?.*",
    client: "
ask() {
  java -Xmx256m -Djute.maxbuffer=16777216 -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' \\
    org.apache.zookeeper.ZooKeeperMain -server $host:$port
}",
    query: script(
        "printf 'create /a\\nset /a 42\\nget /a\\nquit\\n' | ask | grep -x 42",
        "42",
    ),
    small_query: Some(script("echo $(echo ruok | nc $host $port)", "imok")),
    large: Some(script(
        "{ printf 'create /big '; head -c 10485760 /dev/zero | tr '\\0' x; printf '\\nget /big\\nquit\\n'; } | ask |
  awk '/^x/ {print length}'",
        TEN_MIB,
    )),
    ..BROKER
};

const KAFKA: Server = Server {
    name: "kafka",
    port: 9092,
    start: "
printf '%s\\n' process.roles=broker,controller node.id=1 controller.quorum.voters=1@localhost:9093 \\
  listeners=PLAINTEXT://:$PORT,CONTROLLER://:9093 advertised.listeners=PLAINTEXT://$POD_NAME.kafka-pods:$PORT \\
  controller.listener.names=CONTROLLER log.dirs=/data/kafka offsets.topic.replication.factor=1 \\
  group.initial.rebalance.delay.ms=0 message.max.bytes=16777216 connections.max.idle.ms=3600000 > /tmp/kafka.properties
run() { java -Xmx512m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' \"$@\"; }
run kafka.tools.StorageTool format -t MkU3OEVBNTcwNTJENDM2Qg -c /tmp/kafka.properties
exec java -Xmx512m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' kafka.Kafka /tmp/kafka.properties",
    version: "ls /usr/share/brokers/kafka-clients-*",
    client: "
run() { java -Xmx256m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' \"$@\"; }
produce() { run kafka.tools.ConsoleProducer --bootstrap-server $host:$port --producer-property max.request.size=16777216 \\
  --producer-property buffer.memory=67108864 --producer-property acks=all --topic \"$@\"; }
consume() { run org.apache.kafka.tools.consumer.ConsoleConsumer --bootstrap-server $host:$port --from-beginning --max-messages 1 \\
  --consumer-property fetch.max.bytes=16777216 --consumer-property max.partition.fetch.bytes=16777216 --topic \"$@\"; }
# Asks for the protocol versions, and prints the number in the response, which is that in the request.
versions() { printf '\\0\\0\\0\\x0a\\0\\x12\\0\\0\\0\\0\\0\\x07\\xff\\xff' >&3; head -c 8 <&3 | tail -c 4 | od -An -tu1 | tr -d ' '; }",
    query: script("echo 42 | produce a; consume a", "42"),
    small_query: Some(script("exec 3<>/dev/tcp/$host/$port; versions", "0007")),
    large: Some(script(
        "{ head -c 10485760 /dev/zero | tr '\\0' x; echo; } | produce big; consume big | tr -d '\\n' | wc -c",
        TEN_MIB,
    )),
    idle: Some(script("exec 3<>/dev/tcp/$host/$port; sleep $idle; versions", "0007")),
    ..BROKER
};

const ETCD: Server = Server {
    name: "etcd",
    port: 2379,
    start: "
exec etcd --data-dir /data/etcd --listen-client-urls http://0.0.0.0:$PORT --advertise-client-urls http://$POD_NAME.etcd-pods:$PORT",
    readiness: Readiness::Http("/health", None),
    version: "etcd --version | sed -n 1p",
    client: "export ETCDCTL_API=3 ETCDCTL_ENDPOINTS=http://$host:$port",
    query: script("etcdctl put a 42; etcdctl get --print-value-only a", "OK\n42"),
    small_query: Some(script("etcdctl get --print-value-only a", "42")),
    // Ten values, because etcdctl sends at most 2 MiB; they are read in one response.
    large: Some(script(
        "for i in 0 1 2 3 4 5 6 7 8 9; do head -c 1048576 /dev/zero | tr '\\0' x | etcdctl put big$i >&2; done
etcdctl get --prefix big --print-value-only | tr -d '\\n' | wc -c",
        TEN_MIB,
    )),
    idle: Some(script(
        "mkfifo /tmp/watch
etcdctl watch idle > /tmp/watch & watch=$!
exec 3< /tmp/watch
sleep $idle
etcdctl put idle 42
head -n 3 <&3
kill $watch",
        "OK\nPUT\nidle\n42",
    )),
    ..BROKER
};

const NATS: Server = Server {
    name: "nats",
    port: 4222,
    start: "
# The client of the silence answers no pings.
printf '%s\\n' 'max_payload: 16MB' 'ping_interval: \"1h\"' > /tmp/nats.conf
exec nats-server -c /tmp/nats.conf -p $PORT -m 8222 -js -sd /data",
    readiness: Readiness::Http("/healthz", Some(8222)),
    version: "nats-server --version",
    client: "export NATS_URL=nats://$host:$port HOME=/tmp",
    query: script(
        "nats kv add a >&2 || true; nats kv put a a 42; nats kv get a a --raw",
        "42\n42",
    ),
    small_query: Some(script("head -c 4 < /dev/tcp/$host/$port", "INFO")),
    large: Some(script(
        "nats object add big >&2
head -c 10485760 /dev/zero > /tmp/zero
nats object put big /tmp/zero --name=zero --no-progress >&2
nats object get big zero -O /tmp/zero.read --no-progress >&2
wc -c < /tmp/zero.read",
        TEN_MIB,
    )),
    idle: Some(script(
        "exec 3<>/dev/tcp/$host/$port
read -r info <&3
printf 'CONNECT {\"verbose\":false}\\r\\nSUB idle 1\\r\\nPUB idle 1\\r\\n1\\r\\n' >&3
head -n 2 <&3 | tail -n 1 | tr -d '\\r'
sleep $idle
printf 'PONG\\r\\nPUB idle 1\\r\\n2\\r\\n' >&3
grep -m 1 -A 1 '^MSG' <&3 | tail -n 1 | tr -d '\\r'",
        "1\n2",
    )),
    ..BROKER
};

const MOSQUITTO: Server = Server {
    name: "mosquitto",
    port: 1883,
    start: "
printf '%s\\n' \"listener $PORT 0.0.0.0\" 'allow_anonymous true' > /tmp/mosquitto.conf
exec mosquitto -c /tmp/mosquitto.conf",
    version: "{ mosquitto -h || true; } | sed -n 1p",
    client: "",
    query: script(
        "mosquitto_pub -h $host -p $port -q 1 -r -t a -m 42; mosquitto_sub -h $host -p $port -t a -C 1",
        "42",
    ),
    small_query: Some(script("mosquitto_sub -h $host -p $port -t a -C 1", "42")),
    large: Some(script(
        "head -c 10485760 /dev/zero > /tmp/message
mosquitto_pub -h $host -p $port -q 1 -r -t big -f /tmp/message
mosquitto_sub -h $host -p $port -t big -C 1 -N | wc -c",
        TEN_MIB,
    )),
    // The client sends a keep-alive after 20 minutes only.
    idle: Some(script(
        "mosquitto_sub -h $host -p $port -k 1200 -t idle -C 1 & subscriber=$!
sleep $idle
mosquitto_pub -h $host -p $port -q 1 -r -t idle -m 42
wait $subscriber",
        "42",
    )),
    ..BROKER
};

const LDAP: Server = Server {
    name: "ldap",
    port: 389,
    user: 0,
    start: "
mkdir /data/ldap
printf '%s\\n' 'include /etc/ldap/schema/core.schema' 'include /etc/ldap/schema/cosine.schema' \\
  'include /etc/ldap/schema/inetorgperson.schema' 'modulepath /usr/lib/ldap' 'moduleload back_mdb' \\
  'sockbuf_max_incoming_auth 33554432' 'database mdb' 'maxsize 1073741824' 'suffix dc=test' 'rootdn cn=admin,dc=test' \\
  'rootpw secret' 'directory /data/ldap' > /tmp/slapd.conf
exec slapd -d 0 -f /tmp/slapd.conf -h ldap://0.0.0.0:$PORT",
    version: "{ slapd -VV 2>&1 || true; } | sed -n 1p",
    client: "at=(-x -H ldap://$host:$port -D cn=admin,dc=test -w secret)",
    query: script("ldapwhoami \"${at[@]}\"", "dn:cn=admin,dc=test"),
    large: Some(script(
        "head -c 10485760 /dev/zero > /tmp/audio
printf '%s\\n' 'dn: dc=test' 'objectClass: dcObject' 'objectClass: organization' 'o: test' 'dc: test' '' 'dn: cn=big,dc=test' \\
  'objectClass: inetOrgPerson' 'cn: big' 'sn: big' 'audio:< file:///tmp/audio' | ldapadd \"${at[@]}\" >&2
ldapsearch \"${at[@]}\" -LLL -o ldif-wrap=no -b cn=big,dc=test -s base audio | sed -n 's/^audio:: //p' | base64 -d | wc -c",
        TEN_MIB,
    )),
    // Two anonymous binds on one connection.
    idle: Some(script(
        "bind() { printf '\\x30\\x0c\\x02\\x01\\x01\\x60\\x07\\x02\\x01\\x03\\x04\\0\\x80\\0' >&3; echo $(head -c 14 <&3 | od -An -tx1); }
exec 3<>/dev/tcp/$host/$port; bind; sleep $idle; bind",
        "30 0c 02 01 01 61 07 0a 01 00 04 00 04 00\n30 0c 02 01 01 61 07 0a 01 00 04 00 04 00",
    )),
    ..BROKER
};

const SSH: Server = Server {
    name: "ssh",
    port: 22,
    user: 0,
    start: "
mkdir -p /run/sshd
ssh-keygen -q -N '' -t ed25519 -f /run/host_key
printf '%s\\n' 'HostKey /run/host_key' 'UsePAM no' 'PermitEmptyPasswords yes' > /run/sshd_config
exec /usr/sbin/sshd -D -e -f /run/sshd_config -p $PORT",
    version: "ssh -V 2>&1",
    client: "on() { ssh -p $port -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR guest@$host \"$@\"; }",
    query: script("on 'echo $((6*7))'", "42"),
    // Without the exchange of keys, which needs a tenth of a second.
    small_query: Some(script("head -c 8 < /dev/tcp/$host/$port", "SSH-2.0-")),
    large: Some(script("head -c 10485760 /dev/zero | on cat | wc -c", TEN_MIB)),
    idle: Some(script("{ echo 1; sleep $idle; echo 2; } | on cat", "1\n2")),
    ..BROKER
};

const SMTP: Server = Server {
    name: "smtp",
    port: 25,
    unlisted_port: Some(2526),
    user: 0,
    start: "
printf '%s\\n' \"listen on 0.0.0.0 port $PORT\" 'action \"deliver\" maildir \"/data/mail\"' \\
  'match from any for any action \"deliver\"' > /tmp/smtpd.conf
exec smtpd -d -f /tmp/smtpd.conf",
    version: "{ smtpd -h 2>&1 || true; } | sed -n 1p",
    client: "send() { curl -sS smtp://$host:$port --mail-from a@test --mail-rcpt guest@test --upload-file - && echo sent; }",
    query: script("echo 'Subject: test' | send", "sent"),
    large: Some(script(
        "{ printf 'Subject: big\\n\\n'; head -c 10485760 /dev/zero | tr '\\0' x | fold -w 70; } | send",
        "sent",
    )),
    ..BROKER
};

/// Each transfer is a connection to a further port, whose number the server names, so that clients need the address of the pod.
const FTP: Server = Server {
    name: "ftp",
    port: 21,
    user: 0,
    start: "
mkdir -p /run/empty /data/ftp/up
chmod 777 /data/ftp/up
echo 42 > /data/ftp/a
printf '%s\\n' listen=YES listen_ipv6=NO listen_port=$PORT background=NO anonymous_enable=YES write_enable=YES anon_upload_enable=YES \\
  anon_umask=022 anon_root=/data/ftp ftp_username=guest secure_chroot_dir=/run/empty seccomp_sandbox=NO pasv_min_port=30000 \\
  pasv_max_port=30100 idle_session_timeout=3600 > /run/vsftpd.conf
# As process 1 it would crash when a child of another process ends.
vsftpd /run/vsftpd.conf & wait",
    version: "{ vsftpd -v 0>&1 2>&1 || true; } | sed -n 1p",
    query: script("curl -sS ftp://$host:$port/a", "42"),
    large: Some(script(
        "head -c 10485760 /dev/zero | curl -sS --upload-file - ftp://$host:$port/up/$RANDOM-big
curl -sS --list-only ftp://$host:$port/up/ >&2
curl -sS ftp://$host:$port/up/$(curl -sS --list-only ftp://$host:$port/up/ | tail -n 1) | wc -c",
        TEN_MIB,
    )),
    needs_pod_addr: true,
    ..BROKER
};
