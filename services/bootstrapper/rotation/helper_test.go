package rotation

// authorities are those that are rotated, by their files.
var authorities = map[string]authority{frontProxy.file: frontProxy, etcdAuthority.file: etcdAuthority, clusterAuthority.file: clusterAuthority.authority}
